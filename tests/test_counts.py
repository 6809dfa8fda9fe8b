"""What calls cost, counted: planning is a small share of the work, and both grow with the length and no faster."""

from __future__ import annotations

import pytest

from stochastic_attention.benchmark.counts import count
from stochastic_attention.benchmark.sweep import Case
from stochastic_attention.benchmark.workloads import METHODS

COUNTED = [name for name in METHODS if name != "moba"]
SHAPE = {"heads": 16, "window": 64}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", COUNTED)
def test_work_grows_with_the_length_and_planning_is_a_small_share_of_it(name, direction):
    short, long = (count(name, Case(direction, n, 64, 1), **SHAPE) for n in (2048, 4096))
    for what in ("pairs_needed", "pairs_computed", "flops", "bytes_of_memory", "bytes_of_cache", "planned_bytes"):
        # Scope "prefix" has another level for twice the length.
        assert getattr(long, what) <= 2.3 * getattr(short, what), what
    assert long.planned_bytes <= 0.1 * (long.bytes_of_memory + long.bytes_of_cache)
    if not name.startswith("prefix"):
        assert long.operations == short.operations


@pytest.mark.parametrize("name", COUNTED)
def test_tiles_hold_few_pairs_that_are_not_needed(name):
    counts = count(name, Case("forward", 4096, 64, 1), heads=16, window=256)
    assert 1.0 <= counts.pairs_computed / counts.pairs_needed <= 2.6


@pytest.mark.parametrize("name", ["swa", "prefix-sliding", "prefix-block"])
def test_a_step_of_decoding_costs_the_same_whatever_is_cached(name):
    short, long = (count(name, Case("decode", n, 64, 1), **SHAPE) for n in (4096, 65536))
    assert long.flops == short.flops
    assert long.bytes_of_memory <= 2 * short.bytes_of_memory  # which of the columns hold an earlier key is chance
    assert (long.operations, long.kernels) == (0, 3)
