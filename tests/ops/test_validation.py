"""Bad input is a ValueError that names the argument and what came; nothing is ignored, clamped or replaced."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from stochastic_attention import Pattern

from .cases import attention, tensors

BIGBIRD, MOBA = Pattern.bigbird(4, 2), Pattern.moba(4, 2)
SEQUENCE, PREFIX = Pattern.stochastic(4), Pattern.stochastic(4, scope="prefix")

NOT_COUNTS = [2**70, -1, -8, 0, 2.5, True, "4", float("nan")]


def refuses(argument: str, came: object, make) -> None:
    with pytest.raises(ValueError, match=rf"\b{argument}\b.*{re.escape(str(came))}"):
        make()


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("window", lambda value: Pattern.local(value)),
        ("window", lambda value: Pattern.stochastic(value)),
        ("window", lambda value: Pattern.stochastic(value, scope="prefix", shape="block")),
        ("window", lambda value: Pattern.strided(value, 2)),
        ("stride", lambda value: Pattern.strided(2, value)),
        ("block_size", lambda value: Pattern.bigbird(value, 2)),
        ("random_blocks", lambda value: Pattern.bigbird(4, value)),
        ("block_size", lambda value: Pattern.moba(block_size=value)),
        ("top_k", lambda value: Pattern.moba(top_k=value)),
    ],
    ids=["local", "sliding", "block", "strided", "stride", "bigbird", "random_blocks", "block_size", "top_k"],
)
def test_counts(argument, make, value):
    refuses(argument, repr(value), lambda: make(value))


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("block_size", Pattern.moba),
        ("top_k", Pattern.moba),
        ("stride", partial(Pattern.strided, 2)),
        ("random_blocks", partial(Pattern.bigbird, 2)),
    ],
)
def test_only_a_window_may_be_unlimited(argument, make):
    refuses(argument, None, lambda: make(**{argument: None}))


@pytest.mark.parametrize(
    ("options", "argument", "came"),
    [
        ({"local": -1}, "local", -1),
        ({"local": 1.0}, "local", 1.0),
        ({"sinks": -1}, "sinks", -1),
        ({"sinks": False}, "sinks", False),
        ({"seed": -1}, "seed", -1),
        ({"seed": 2**63}, "seed", 2**63),
        ({"seed": "x"}, "seed", "'x'"),
        ({"correction": -0.5}, "correction", -0.5),
        ({"correction": float("nan")}, "correction", "nan"),
        ({"correction": float("inf")}, "correction", "inf"),
        ({"correction": True}, "correction", True),
        ({"local": 2**40}, "local", 2**40),
        ({"scope": "document"}, "scope", "'document'"),
        ({"shape": "ring"}, "shape", "'ring'"),
        ({"shape": None}, "shape", None),
        ({"per_head": 1}, "per_head", 1),
    ],
    ids=str,
)
def test_options_of_a_pattern(options, argument, came):
    refuses(argument, came, lambda: Pattern.stochastic(4, **options))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("full", "window", 3),
        ("full", "sinks", 1),
        ("local", "seed", 1),
        ("local", "top_k", 1),
        ("moba", "window", 4),
        ("moba", "random_blocks", 2),
        ("bigbird", "window", 4),
        ("bigbird", "per_head", True),
        ("bigbird", "correction", 0.5),
        ("stochastic", "top_k", 2),
    ],
)
def test_fields_of_another_kind(kind, field, value):
    own = {"local": SEQUENCE, "stochastic": SEQUENCE, "moba": MOBA, "bigbird": BIGBIRD}.get(
        kind, Pattern.full()
    ).to_dict()
    refuses(field, kind, lambda: Pattern(**{**own, "kind": kind, field: value}))


@pytest.mark.parametrize(
    ("options", "argument", "came"),
    [
        ({"layer": -1}, "layer", -1),
        ({"layer": 2**32}, "layer", 2**32),
        ({"layer": 1.0}, "layer", 1.0),
        ({"step": -1}, "step", -1),
        ({"step": 2**63}, "step", 2**63),
        ({"step": True}, "step", True),
        ({"step": torch.tensor([1])}, "step", [1]),
        ({"step": torch.tensor(1.0)}, "step", "float32"),
        ({"step": torch.tensor(1, dtype=torch.int32)}, "step", "int32"),
        ({"causal": 1}, "causal", 1),
        ({"causal": None}, "causal", None),
        ({"decode": 1}, "decode", 1),
        ({"decode": None}, "decode", None),
        ({"decode": True, "causal": False}, "decode", "causal=False"),
        ({"decode": True, "backend": "blocked"}, "decode", "permutation of its own"),
        ({"scale": float("nan")}, "scale", "nan"),
        ({"scale": "1"}, "scale", "'1'"),
        ({"softcap": 0.0}, "softcap", 0.0),
        ({"softcap": -1.0}, "softcap", -1.0),
        ({"softcap": float("inf")}, "softcap", "inf"),
        ({"sink_logits": torch.zeros(2)}, "sink_logits", [2]),
        ({"sink_logits": torch.zeros(4, 1)}, "sink_logits", [4, 1]),
        ({"sink_logits": torch.zeros(4, dtype=torch.int64)}, "sink_logits", "int64"),
        ({"sink_logits": 0.0}, "sink_logits", "float"),
        ({"sink_logits": torch.zeros(4, device="meta")}, "sink_logits", "meta"),
        ({"return_lse": 1}, "return_lse", 1),
        ({"backend": "fastest"}, "backend", "'fastest'"),
        ({"backend": ["reference"]}, "backend", "['reference']"),
        ({"documents": torch.zeros(2, 6, dtype=torch.int64)}, "documents", [2, 6]),
        ({"documents": torch.zeros(2, 8, dtype=torch.int64)}, "documents", [2, 8]),
        ({"documents": torch.zeros(7, dtype=torch.int64)}, "documents", [7]),
        ({"documents": torch.zeros(1, 7, dtype=torch.int64)}, "documents", [1, 7]),
        ({"documents": torch.zeros(2, 1, 7, 7, dtype=torch.int64)}, "documents", [2, 1, 7, 7]),
        ({"documents": torch.zeros(2, 7)}, "documents", "float32"),
        ({"documents": torch.zeros(2, 7, dtype=torch.bool)}, "documents", "bool"),
        ({"documents": torch.full((2, 7), -2)}, "documents", -2),
        ({"documents": torch.zeros(2, 7, dtype=torch.int64, device="meta")}, "documents", "meta"),
        ({"documents": [[0] * 7] * 2}, "documents", "list"),
        ({"query_positions": torch.arange(6)}, "query_positions", [6]),
        ({"query_positions": torch.arange(8)}, "query_positions", [8]),
        ({"query_positions": torch.arange(7).expand(3, 7)}, "query_positions", [3, 7]),
        ({"query_positions": torch.arange(7).view(1, 7)}, "query_positions", [1, 7]),
        ({"query_positions": torch.arange(1, 8)}, "query_positions", 7),
        ({"query_positions": torch.arange(7) - 1}, "query_positions", -1),
        ({"query_positions": torch.arange(7.0)}, "query_positions", "float32"),
        ({"query_positions": torch.arange(7, device="meta")}, "query_positions", "meta"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else str(case),
)
def test_options_of_the_op(options, argument, came):
    q, k, v = tensors(7)
    refuses(argument, came, lambda: attention(q, k, v, SEQUENCE, **options))


def zeros(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize(
    ("inputs", "argument", "came"),
    [
        ((zeros(4, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "q", [4, 7, 8]),
        ((None, zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "q", "NoneType"),
        ((zeros(2, 4, 7, 8), zeros(1, 2, 7, 8), zeros(1, 2, 7, 8)), "k", [1, 2, 7, 8]),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 9), zeros(2, 2, 7, 9)), "k", [2, 2, 7, 9]),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 6, 8)), "v", [2, 2, 6, 8]),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8), zeros(2, 1, 7, 8)), "v", [2, 1, 7, 8]),
        ((zeros(2, 5, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "q", 5),
        ((zeros(2, 1, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "q", 1),
        ((zeros(2, 4, 7, 8), zeros(2, 0, 7, 8), zeros(2, 0, 7, 8)), "k", 4),
        ((zeros(2, 4, 7, 0), zeros(2, 2, 7, 0), zeros(2, 2, 7, 8)), "q", 0),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 0)), "v", 0),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8, dtype=torch.int64), zeros(2, 2, 7, 8)), "k", "int64"),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8, dtype=torch.complex64)), "v", "complex64"),
        ((zeros(2, 4, 7, 8), zeros(2, 2, 7, 8, device="meta"), zeros(2, 2, 7, 8)), "k", "meta"),
        ((zeros(2, 4, 7, 8, device="meta"),) * 3, "q", "meta"),
        ((zeros(2, 4, 7, 8).to_sparse(), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "q", "sparse"),
        ((zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 8)), "query_positions", 5),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(inputs, argument, came):
    refuses(argument, came, lambda: attention(*inputs, SEQUENCE))


@pytest.mark.parametrize("pattern", ["full", None, 4], ids=repr)
def test_not_a_pattern(pattern):
    refuses("pattern", type(pattern).__name__, lambda: attention(*tensors(7), pattern))


@pytest.mark.parametrize("pattern", [BIGBIRD, MOBA, PREFIX], ids=str)
def test_patterns_that_only_look_back(pattern):
    refuses("causal", False, lambda: attention(*tensors(7), pattern, causal=False))
    if pattern is not MOBA:
        refuses("causal", False, lambda: pattern.dense_mask(7, causal=False))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"n": -1}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 4, "heads": 0}, "heads"),
        ({"n": 4, "layer": -1}, "layer"),
    ],
    ids=str,
)
def test_dense_mask(options, argument):
    refuses(argument, options[argument], lambda: Pattern.stochastic(4, per_head=True).dense_mask(**options))


def test_a_mask_that_depends_on_the_content_is_refused():
    with pytest.raises(ValueError, match=r"dense_mask.*MoBA"):
        MOBA.dense_mask(7)


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern.local(2**31 - 1),
        Pattern.stochastic(2**31 - 1),
        Pattern.stochastic(2**31 - 1, scope="prefix"),
        Pattern.local(2, sinks=2**31 - 1),
        Pattern.bigbird(2**31 - 1, 2),
        Pattern.bigbird(2, 2**31 - 1),
        Pattern.moba(2**31 - 1, 2),
    ],
    ids=str,
)
def test_large_counts_are_not_an_error(backend, pattern):
    inputs = tensors(7)
    expected = attention(*inputs, Pattern.full(), backend=backend)
    torch.testing.assert_close(attention(*inputs, pattern, backend=backend), expected, rtol=1e-12, atol=1e-12)


def test_numbers_of_numpy_are_numbers():
    pattern = Pattern.stochastic(np.int64(4), local=np.uint8(2), correction=np.float32(0.5), seed=np.int32(3))
    assert pattern == Pattern.stochastic(4, local=2, correction=0.5, seed=3)
    assert json.loads(json.dumps(pattern.to_dict())) == pattern.to_dict()
    refuses("window", repr(np.bool_(True)), lambda: Pattern.local(np.bool_(True)))
    refuses("window", 4.0, lambda: Pattern.local(np.float64(4)))
    q = torch.randn(1, 1, 9, 2)
    drawn = attention(q, q, q, pattern, layer=np.int64(2), step=np.int64(5))
    assert torch.equal(drawn, attention(q, q, q, pattern, layer=2, step=5))


def test_patterns_are_values():
    assert Pattern.stochastic(4) == Pattern.stochastic(4, seed=0)
    assert len({Pattern.stochastic(4), Pattern.stochastic(4), Pattern.stochastic(5)}) == 2
    assert str(Pattern.stochastic(4, local=2)) == "stochastic(window=4, local=2)"
    with pytest.raises(AttributeError):
        Pattern.full().window = 3  # type: ignore[misc]
