"""lm-evaluation-harness on a swapped model (extra "harness").

import lm_eval
from stochastic_attention.evaluation.harness import SwappedLM

lm_eval.simple_evaluate(SwappedLM(pretrained=model, tokenizer=tokenizer, batch_size=8), tasks=["arc_easy"])
"""

from .lm import SwappedLM as SwappedLM
