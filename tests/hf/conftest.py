"""Tiny models of every supported family, with random weights."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stochastic_attention import Pattern, backend_names  # noqa: E402
from stochastic_attention.hf.state import FAMILIES  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Large enough weights for attention to be far from uniform.
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


PATTERNS = (
    Pattern.stochastic(4),
    Pattern.stochastic(4, scope="prefix", shape="block"),
    Pattern.stochastic(3, scope="prefix", local=2, sinks=1, correction=0.5, per_head=True),
    Pattern.local(4, sinks=1),
    Pattern.moba(block_size=4, top_k=2),
)


def pytest_generate_tests(metafunc):
    """`family`, `pattern` and `backend`: every value of each; of the pairs of family and pattern, those that differ."""
    names = metafunc.fixturenames
    if "family" in names and "pattern" in names:
        pairs = [(family, pattern) for family in FAMILIES for pattern in PATTERNS[: None if family == "qwen3" else 2]]
        metafunc.parametrize(("family", "pattern"), pairs, ids=str)
    elif "family" in names:
        metafunc.parametrize("family", FAMILIES)
    elif "pattern" in names:
        metafunc.parametrize("pattern", PATTERNS, ids=str)
    if "backend" in names:
        metafunc.parametrize("backend", backend_names())


@pytest.fixture
def make_model():
    """make_model(family, attn_implementation, **config) -> a model in eval mode; equal arguments give equal weights."""

    def make(family="qwen3", attn_implementation="sdpa", **config):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(family, **(SIZES | config))
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
        return model.eval()

    return make


@pytest.fixture
def ids():
    """Token ids [2, 21], none of them the padding id."""
    return torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def cache_name():
    """How a forward method calls its key/value cache: it was renamed inside the range of supported versions."""
    parameters = inspect.signature(transformers.Qwen3ForCausalLM.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
