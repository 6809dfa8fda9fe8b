"""Tiny language models with random weights, a kind of attention each."""

import pytest
import torch
import transformers

from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM

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
