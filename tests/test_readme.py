"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

from stochastic_attention import Pattern

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


def test_the_op():
    names = {}
    exec(EXAMPLES[0], names)
    assert names["out"].shape == names["q"].shape == names["q"].grad.shape


def test_the_swap(capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    exec(EXAMPLES[1], {"model": model, "union": Pattern.stochastic(window=4, local=4)})
    assert capsys.readouterr().out.count("stochastic_attention: stochastic(window=4, local=4)") == 2
