"""The oracle against loops over single tokens: N(i) exactly, and everything computed from it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stochastic_attention import Pattern, attention

from . import brute
from .cases import LAYOUTS, all_patterns, assert_same, is_causal_only, outcome, stochastic_patterns, tensors

oracle = partial(attention, backend="reference", return_lse=True)

WITH_CAUSALITY = [
    pytest.param(pattern, causal, id=f"{pattern}-{'causal' if causal else 'both-ways'}")
    for pattern in all_patterns(window=3)
    for causal in (True, False)
    if causal or not is_causal_only(pattern)
]


@pytest.mark.parametrize(("pattern", "causal"), [p for p in WITH_CAUSALITY if p.values[0].kind != "moba"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 26])
def test_dense_mask_is_the_definition(pattern, causal, n):
    heads = 2 if pattern.per_head else 1
    mask = pattern.dense_mask(n, layer=3, step=2**40 + 5, causal=causal, heads=heads)
    options = {"causal": causal, "layer": 3, "step": 2**40 + 5}
    expected = [
        [
            [j in seen for j in range(n)]
            for seen in (brute.visible(pattern, [0] * n, i, head=h, **options) for i in range(n))
        ]
        for h in range(heads)
    ]
    assert mask.dtype == torch.bool
    assert mask.tolist() == expected


@pytest.mark.parametrize(("pattern", "causal"), WITH_CAUSALITY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients(pattern, causal, layout):
    n = 13
    inputs = tensors(n, dims=(5, 3))
    options = {"pattern": pattern, "documents": LAYOUTS[layout](n), "causal": causal, "layer": 2, "step": 9}
    assert_same(outcome(oracle, *inputs, **options), outcome(brute.attention, *inputs, **options))


@pytest.mark.parametrize(
    "extra",
    [
        {"scale": 1.3},
        {"softcap": 0.7},
        {"sink_logits": torch.tensor([0.5, -20.0, 20.0, 0.0], dtype=torch.float64)},
        {"softcap": 2.0, "scale": -0.4, "sink_logits": torch.tensor([-1.0, 2.0, 0.3, 0.0], dtype=torch.float64)},
    ],
    ids=lambda extra: "+".join(extra),
)
@pytest.mark.parametrize("layout", ["single", "packed-and-padded"])
@pytest.mark.parametrize("pattern", all_patterns(window=2), ids=str)
def test_scores_are_scaled_capped_and_sunk(pattern, layout, extra):
    inputs = tensors(11, dims=(4, 4))
    sinks = [extra["sink_logits"]] if "sink_logits" in extra else []
    options = {"pattern": pattern, "documents": LAYOUTS[layout](11)}
    options |= {name: value for name, value in extra.items() if name != "sink_logits"}
    got = outcome(oracle, *inputs, *sinks, **options)
    assert_same(got, outcome(brute.attention, *inputs, *sinks, **options))


@pytest.mark.parametrize(
    "places",
    [torch.tensor([12]), torch.tensor([5, 6, 7]), torch.tensor([[3, 12, 0, 3], [1, 1, 8, 11]])],
    ids=["one-token", "chunk", "per-row"],
)
@pytest.mark.parametrize("layout", ["single", "left-padded", "interleaved"])
@pytest.mark.parametrize("pattern", all_patterns(window=3), ids=str)
def test_query_positions(pattern, layout, places):
    inputs = tensors(13, queries=places.shape[-1])
    options = {"pattern": pattern, "documents": LAYOUTS[layout](13), "query_positions": places}
    assert_same(outcome(oracle, *inputs, **options), outcome(brute.attention, *inputs, **options))


@pytest.mark.parametrize("layout", ["single", "left-padded", "interleaved"])
@pytest.mark.parametrize("pattern", [p for p in all_patterns(window=3) if p.is_random], ids=str)
def test_decoding_permutes_the_prefix(pattern, layout):
    inputs = tensors(13)
    options = {"pattern": pattern, "documents": LAYOUTS[layout](13), "decode": True, "layer": 4}
    assert_same(outcome(oracle, *inputs, **options), outcome(brute.attention, *inputs, **options))


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (8, 1), (4, 4)], ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("pattern", stochastic_patterns(window=3), ids=str)
def test_query_heads_share_consecutive_key_heads(pattern, heads):
    inputs = tensors(9, batch=1, heads=heads, dims=(3, 3))
    assert_same(outcome(oracle, *inputs, pattern=pattern), outcome(brute.attention, *inputs, pattern=pattern))


def test_a_local_window_counts_the_query_itself():
    mask = Pattern.local(window=4).dense_mask(12)[0]
    assert mask[7].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert mask.sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]


def test_a_union_written_out():
    """Window 1 (each query is near itself alone), local 2, one sink."""
    mask = Pattern.stochastic(window=1, local=2, sinks=1).dense_mask(6)[0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]
