"""Counts of keys, against the rows of the oracle's masks."""

from __future__ import annotations

import pytest
import torch

from stochastic_attention import Pattern, keys_per_query

from .cases import MOBA, all_patterns, is_causal_only, stochastic_patterns, union

HEADS = 2
WHERE = {"layer": 3, "step": 2**40 + 5, "heads": HEADS}
# From which query on: everyone, some, the last alone, nobody.
FIRST = [0, 13, 36, 37]
DENSE = [pattern for pattern in all_patterns(window=3) if pattern.kind != "moba"]
# Every way in which a query may see its whole past, whatever its permutation.
SATURATED = [Pattern.stochastic(None), union(40), Pattern.stochastic(3, local=40), Pattern.stochastic(3, sinks=40)]
WAYS = [(p, causal) for p in (*DENSE, *SATURATED) for causal in (True, False) if causal or not is_causal_only(p)]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("pattern", "causal"), WAYS, ids=str)
def test_counts_are_the_rows_of_the_mask(pattern, causal, first):
    mask = pattern.dense_mask(37, causal=causal, **WHERE)
    counts = keys_per_query(pattern, 37, causal=causal, first=first, **WHERE)
    assert torch.equal(counts, mask.sum(-1)[:, first:])


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("pattern", [*DENSE, *SATURATED], ids=str)
def test_decoding_counts_the_last_row_of_each_prefix(pattern, first):
    last_rows = [pattern.dense_mask(i + 1, **WHERE)[:, -1].sum(-1) for i in range(37)]
    counts = keys_per_query(pattern, 37, first=first, decode=True, **WHERE)
    assert torch.equal(counts, torch.stack(last_rows, dim=-1)[:, first:])


@pytest.mark.parametrize("pattern", stochastic_patterns(window=3), ids=str)
def test_decoding_counts_do_not_depend_on_how_many_are_counted_at_once(pattern):
    together = keys_per_query(pattern, 150, decode=True, **WHERE)
    apart = [keys_per_query(pattern, i + 1, first=i, decode=True, **WHERE) for i in range(150)]
    assert torch.equal(together, torch.cat(apart, dim=-1))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_moba_counts_the_own_block_and_the_chosen_ones(first, decode):
    size, top_k = MOBA.block_size, MOBA.top_k
    expected = [i % size + 1 + min(top_k - 1, i // size) * size for i in range(first, 37)]
    assert keys_per_query(MOBA, 37, first=first, decode=decode).tolist() == [expected]


@pytest.mark.parametrize("first", [-1, 38, 1.0, True])
def test_the_first_query_must_be_one_of_them(first):
    with pytest.raises(ValueError, match=r"first must be an integer in \[0, 37\]"):
        keys_per_query(Pattern.local(3), 37, first=first)


def test_decoding_looks_back():
    with pytest.raises(ValueError, match="decode=True needs causal=True"):
        keys_per_query(Pattern.local(3), 37, decode=True, causal=False)
