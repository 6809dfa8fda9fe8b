"""Tiny language models with random weights, a kind of attention each; a tokenizer of one token a byte."""

import random
from functools import partial

import pytest
import torch
import transformers
import yaml

from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM
from stochastic_attention.lm.tokenizer import LearnedTokenizer, learn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough weights for attention to be far from uniform.
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
KINDS = ("full", "swa", "sa", "gated")
MIXED = ["gated", "full", "sa"]


@pytest.fixture
def make_lm():
    """make_lm(layer_attention, scope=, **config) -> a model in eval mode; equal arguments give equal weights."""

    def make(layer_attention="gated", scope="prefix", **config):
        patterns = {"swa": {"window": 4}, "sa": {"window": 4, "scope": scope}}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = StochasticLlamaConfig(layer_attention=layer_attention, **(SIZES | patterns | config))
            return StochasticLlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def make_llama():
    """make_llama() -> the plain Llama of the same sizes and weights."""

    def make():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()

    return make


@pytest.fixture
def ids():
    """Token ids [2, 21], none of them the padding id."""
    return torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def bytes_tokenizer():
    return learn(iter(["ab"]), LearnedTokenizer(vocab_size=259))


@pytest.fixture(scope="session")
def spell(bytes_tokenizer):
    """Token by token, in words: a letter each, < begins a document, > ends it."""

    def spell(ids):
        marks = {bytes_tokenizer.bos_token_id: "<", bytes_tokenizer.eos_token_id: ">"}
        return "".join(marks.get(int(token)) or bytes_tokenizer.decode([int(token)]) for token in ids)

    return spell


@pytest.fixture
def write(tmp_path):
    def write(*documents, name="text.txt"):
        path = tmp_path / name
        path.write_text("\n\x1e\n".join(documents), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def config_in():
    """config_in(folder, training={...}, model={...}, ...): a YAML file of a run of 6 steps on 2 layers, changed so."""

    def make(folder, **sections):
        generator = random.Random(0)
        text = folder / "corpus.txt"
        text.write_text("\n\x1e\n".join("".join(generator.choices("abcd \n", k=90)) for _ in range(40)), "utf-8")
        config = {
            "model": {
                "model_type": "stochastic_llama",
                "layer_attention": "gated",
                "swa": {"window": 4},
                "sa": {"window": 4},
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "tokenizer": {"train": {"vocab_size": 259}},
            "data": {"text": str(text), "validation": 0.1, "epochs": 3},
            "training": {
                "sequence_length": 24,
                "steps": 6,
                "global_batch_sequences": 4,
                "learning_rate": 0.01,
                "warmup_steps": 2,
                "save_every": 2,
                "eval_every": 2,
                "device": "cpu",
                "peak_flops": 1e9,
            },
        }
        for section, changes in sections.items():
            config[section] = {k: v for k, v in (config[section] | changes).items() if v != "absent"}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config), "utf-8")
        return path

    return make


@pytest.fixture
def config_file(tmp_path, config_in):
    """The same, in the test's own folder."""
    return partial(config_in, tmp_path)
