"""The kernels that plan: the same numbers as in PyTorch, on a CUDA device or in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stochastic_attention import Pattern
from stochastic_attention.ops import routing
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout
from stochastic_attention.ops.plan import lower

from .cases import LAYOUTS, all_patterns, assert_same, attention, outcome, tensors, union

pytest.importorskip("triton")

from stochastic_attention.ops.triton import keys, plans, schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = 2**63 - 1


@pytest.mark.parametrize("step_is_tensor", [False, True])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(keys._BLOCK),
        torch.arange(2 * keys._BLOCK + 1)[None, None],
        torch.tensor([[[0, 2**31, 2**32 - 1]], [[2**31 - 1, 5, 5]]]),
        torch.zeros(2, 1, 0, dtype=torch.int64),
    ],
    ids=lambda x: str(list(x.shape)),
)
def test_routing_keys(positions, heads, step_is_tensor):
    positions = positions.to(DEVICE)
    for seed, step, layer, head in ((0, 0, 0, 0), (1, 2**40 + 3, 31, 2**31), (LARGEST, LARGEST, 2**32 - 1, 2**32 - 1)):
        words = {
            "seed": seed,
            "step": torch.tensor(step, device=DEVICE) if step_is_tensor else step,
            "layer": layer,
            "head": head if heads is None else torch.arange(heads, device=DEVICE)[:, None],
        }
        got, expected = (f(positions, **words) for f in (keys.routing_keys, routing.routing_keys))
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def assert_tiles_agree(
    pattern: Pattern, n: int, *, heads: tuple[int, int] = (1, 1), causal: bool = True, places: Tensor | None = None,
    documents: Tensor | None = None,
) -> None:  # fmt: skip
    queries = n if places is None else len(places)
    batch = 1 if documents is None else len(documents)
    q, k, v = (x.to(DEVICE) for x in tensors(n, batch=batch, heads=heads, queries=queries, dims=(4, 4)))
    documents, places = (None if x is None else x.to(DEVICE) for x in (documents, places))
    layout = make_layout(documents, places, batch=batch, queries=queries, keys=n, device=k.device)
    call = Call.checked(q, k, v, pattern, layout=layout, causal=causal)
    for p in lower(call):
        s = schedule.schedule(call, p)
        for sizes in ((32, 16), (16, 32)):
            got, expected = schedule.cut_by_kernel(s, *sizes), schedule.cut(s, *sizes)
            assert torch.equal(got.queries, expected.queries)
            assert torch.equal(got.keys, expected.keys)


@pytest.fixture
def small_groups(monkeypatch):
    """Groups that a short text fills several of."""
    group = schedule._group
    monkeypatch.setattr(schedule, "_SMALLEST_GROUP", 4)
    monkeypatch.setattr(schedule, "_group", lambda call: 32 if group(call) else 0)


@pytest.mark.usefixtures("small_groups")
class TestTiles:
    @pytest.mark.parametrize("pattern", all_patterns(window=8), ids=str)
    def test_patterns(self, pattern):
        assert_tiles_agree(pattern, 67)

    @pytest.mark.parametrize("layout", ["left-padded", "packed-and-padded", "interleaved", "all-padding"])
    def test_layouts(self, layout):
        assert_tiles_agree(union(8), 37, documents=LAYOUTS[layout](37))

    @pytest.mark.parametrize("n", [1, 31, 32, 33, 64])
    def test_lengths_about_a_tile(self, n):
        for shape in ("sliding", "block"):
            assert_tiles_agree(Pattern.stochastic(8, shape=shape), n)

    def test_heads_and_documents(self):
        pattern = Pattern.stochastic(8, per_head=True)
        assert_tiles_agree(pattern, 37, heads=(6, 3), documents=LAYOUTS["packed-and-padded"](37))
        assert_tiles_agree(Pattern.moba(8, 2), 37, heads=(6, 3))

    def test_both_ways_and_few_queries(self):
        assert_tiles_agree(union(8), 37, causal=False)
        assert_tiles_agree(union(8), 37, places=torch.tensor([36, 0, 3, 3, *range(5, 31)]))


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    "pattern", [union(8, per_head=True), Pattern.stochastic(8, scope="prefix"), Pattern.stochastic(8)], ids=str
)
def test_attention_on_what_they_plan(pattern, monkeypatch):
    """As on a CUDA device, where nothing else plans."""
    drawn, cut, by_kernel = [], [], schedule.cut_by_kernel

    def draw(*args, **words):
        drawn.append(args)
        return keys.routing_keys(*args, **words)

    def make(*args):
        cut.append(args)
        return by_kernel(*args)

    monkeypatch.setattr(plans, "lower", lambda call, _draw: lower(call, draw))
    monkeypatch.setattr(plans, "_KEPT", plans._Kept(0))
    monkeypatch.setattr(schedule, "cut_by_kernel" if DEVICE == "cuda" else "cut", make)
    inputs = [x.to(DEVICE, torch.float32) for x in tensors(37, batch=1, heads=(2, 2), dims=(16, 16))]
    options = {"pattern": pattern, "return_lse": True, "step": torch.tensor(2**33 + 1, device=DEVICE), "layer": 3}
    got, expected = (outcome(partial(attention, backend=name, **options), *inputs) for name in ("triton", "reference"))
    assert_same(got, expected, tolerance=2e-5)
    assert drawn
    assert cut


def test_they_compile_for_cards_that_are_not_here(tmp_path):
    script = Path(__file__).parent / "planning_resources.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2 * (4 + 4)
    for kernel in found:
        assert kernel["registers"] <= 64, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 1024, kernel
