"""Tiny models of every supported family, with random weights."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stochastic_attention import Pattern, backend_names  # noqa: E402
from stochastic_attention.hf.state import FAMILIES  # noqa: E402
from stochastic_attention.ops.native import why_not_built  # noqa: E402

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


# What is peculiar to a family. Windows are longer than the rows of most tests: a test of windows asks for a short one.
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
FAMILY = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS},
    "mistral": {"sliding_window": 64},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, **EXPERTS},
    "gemma2": {
        "sliding_window": 64,
        "layer_types": ALTERNATING,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"sliding_window": 64, "layer_types": ALTERNATING, "query_pre_attn_scalar": 20},
    "gpt_oss": {"sliding_window": 64, "layer_types": ALTERNATING, "num_local_experts": 4, **EXPERTS},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
SLIDING_FAMILIES = ("mistral", "gemma2", "gemma3_text", "gpt_oss")
# Their softcap or sinks are lost in sdpa.
EAGER_FAMILIES = ("gemma2", "gpt_oss")
# Backends that take whole sequences here. Kernels for GPUs run in an interpreter, which whole models are too large for.
BACKENDS = [
    name for name in backend_names() if name not in ("gather", "triton") and not (name == "cpp" and why_not_built())
]

PATTERNS = (
    Pattern.stochastic(4),
    Pattern.stochastic(4, scope="prefix", shape="block"),
    Pattern.stochastic(3, scope="prefix", local=2, sinks=1, correction=0.5, per_head=True),
    Pattern.local(4, sinks=1),
    Pattern.bigbird(3, 1, local=2, sinks=1),
    Pattern.moba(block_size=4, top_k=2),
)


def pytest_generate_tests(metafunc):
    """`family`, `pattern`, `backend` and `native`, where a test does not give its own: every value.

    Of the pairs of family and pattern, only qwen3 has all.
    """
    own = [str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")]
    names = [name for name in metafunc.fixturenames if not any(name in arguments for arguments in own)]
    if "family" in names and "native" in names:
        pairs = [(f, n) for f in FAMILIES for n in ("sdpa", "eager") if n == "eager" or f not in EAGER_FAMILIES]
        metafunc.parametrize(("family", "native"), pairs)
    elif "native" in names:
        metafunc.parametrize("native", ["sdpa", "eager"])
    if "family" in names and "pattern" in names:
        pairs = [(family, pattern) for family in FAMILIES for pattern in PATTERNS[: None if family == "qwen3" else 2]]
        metafunc.parametrize(("family", "pattern"), pairs, ids=str)
    elif "family" in names and "native" not in names:
        metafunc.parametrize("family", FAMILIES)
    elif "pattern" in names:
        metafunc.parametrize("pattern", PATTERNS, ids=str)
    if "backend" in names:
        metafunc.parametrize("backend", BACKENDS)


@pytest.fixture
def make_model():
    """make_model(family, attn_implementation, **config) -> a model in eval mode; equal arguments give equal weights."""

    def make(family="qwen3", attn_implementation=None, **config):
        if attn_implementation is None:
            attn_implementation = "eager" if family in EAGER_FAMILIES else "sdpa"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILY.get(family, {}) | config))
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):  # gpt-oss leaves them to whatever memory held
                    torch.nn.init.normal_(parameter)
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
