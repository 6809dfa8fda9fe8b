"""lm-evaluation-harness on a swapped model (extra "harness").

import lm_eval
from stochastic_attention.evaluation.harness import SwappedLM

lm_eval.simple_evaluate(SwappedLM(pretrained=model, tokenizer=tokenizer, batch_size=8), tasks=["arc_easy"])
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lm_eval.models.huggingface import HFLM
from tqdm import tqdm


class SwappedLM(HFLM):
    """The harness's `HFLM`, with batches of loglikelihood requests that need no padding. Arguments: those of `HFLM`.

    `HFLM` pads such batches at the right and tells the model nothing of it. That is harmless where a token's keys do
    not depend on what comes later, but scope "sequence" draws its permutation over the whole row: padding would take
    part, and the scores would move with the batch size. Here rows of one length run together. Generation needs no such
    care: there `HFLM` passes its attention mask.
    """

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        by_length = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            kept = min(len(context) + len(continuation), self.max_length + 1)  # type: ignore[attr-defined]
            by_length[kept].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood requests") as progress:
            for length in sorted(by_length, reverse=True):  # the longest first, so that too large a batch fails at once
                indices = by_length[length]
                alike = [requests[index] for index in indices]
                found = super()._loglikelihood_tokens(alike, disable_tqdm=True, override_bs=override_bs)  # type: ignore[misc]
                answers |= zip(indices, found, strict=True)
                progress.update(len(indices))
        return [answers[index] for index in range(len(requests))]
