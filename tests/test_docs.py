"""The examples of README and docs run as they stand."""

import re
from pathlib import Path

import pytest
import torch

from stochastic_attention import Pattern

ROOT = Path(__file__).parent.parent


def examples(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_op():
    names = {}
    exec(examples("README.md")[0], names)
    assert names["out"].shape == names["q"].shape == names["q"].grad.shape


def test_the_swap(capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    exec(examples("README.md")[1], {"model": model, "union": Pattern.stochastic(window=4, local=4)})
    assert capsys.readouterr().out.count("stochastic_attention: stochastic(window=4, local=4)") == 2


def test_the_gated_layer():
    names = {"torch": torch, "Pattern": Pattern}
    exec(examples("README.md")[2], names)
    assert names["y"].shape == (1, 4096, 512)


def test_the_page_on_swapping():
    pytest.importorskip("transformers")
    names = {}
    for example in examples("docs/swap.md"):
        exec(example, names)
    assert {"whole", "loss", "built"} <= set(names)


def test_the_page_on_models():
    pytest.importorskip("transformers")
    names = {}
    for example in examples("docs/models.md"):
        exec(example, names)
    assert names["y"].shape == names["x"].shape
    assert names["text"].shape == (1, 35)


def test_the_page_on_long_context(monkeypatch, tmp_path):
    hf = pytest.importorskip("stochastic_attention.hf")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.chdir(tmp_path)
    preset = hf.Preset({1: Pattern.local(4)})
    hf.save_preset(Path("results/mine/recommended.json"), "mine", preset)
    exec(examples("docs/long-context.md")[0], {"model": model})
    assert "local(window=4)" in str(hf.report(model))


def test_the_page_on_training():
    pytest.importorskip("transformers")
    names = {}
    for example in examples("docs/training.md"):
        exec(example, names)
    assert names["outcome"].step == 4
    assert names["model"].config.layer_attention == "gated"
