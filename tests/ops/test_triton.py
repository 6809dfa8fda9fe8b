"""The fused kernels: against the oracle, on a CUDA device where there is one, else in Triton's interpreter.

In the interpreter all is float64, so that agreement is to 1e-10. The tests of every backend run there too, marked slow.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stochastic_attention import Pattern, attention, keys_per_query
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout
from stochastic_attention.ops.plan import lower

from .cases import LAYOUTS, MOBA, all_patterns, assert_same, outcome, tensors, union

pytest.importorskip("triton")

from stochastic_attention.ops.triton import backend, launch, operator, plans, schedule
from stochastic_attention.ops.triton.sizes import Sizes
from stochastic_attention.ops.triton.work import count_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.float32, 2e-5) if DEVICE == "cuda" else (torch.float64, 1e-10)
SINKS = torch.tensor([0.5, -20.0], dtype=DTYPE)
PATTERNS = all_patterns(window=8)
small = partial(tensors, batch=1, heads=(2, 1), dtype=DTYPE)


_group = schedule._group


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles and groups that a short text fills several of."""
    monkeypatch.setattr(plans, "_KEPT", plans._Kept(10**6))
    monkeypatch.setattr(launch, "choose", lambda *_: Sizes(32, 16, warps=4, stages=2))
    monkeypatch.setattr(schedule, "_SMALLEST_GROUP", 4)
    monkeypatch.setattr(schedule, "_group", lambda call: 32 if _group(call) else 0)


def run(backend: str, *inputs: Tensor, device: str = DEVICE, **options) -> dict[str, Tensor]:
    """out, lse and every gradient through both, under fixed random cotangents."""
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    leaves = [x.detach().to(device).requires_grad_() for x in inputs]
    sinks = {"sink_logits": leaves[3]} if len(leaves) > 3 else {}
    results = attention(*leaves[:3], **sinks, backend=backend, return_lse=True, **options)
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(device, x.dtype) for x in results]
    gradients = torch.autograd.grad(results, leaves, cotangents)
    names = ("out", "lse", "dq", "dk", "dv", "d_sink_logits")
    return {name: x.detach().cpu() for name, x in zip(names, (*results, *gradients), strict=False)}


def assert_like_the_oracle(*inputs: Tensor, **options) -> None:
    got = run("triton", *inputs, **options)
    exact = run("reference", *(x.double() for x in inputs), device="cpu", **options)
    assert_same(got, {name: x.to(got[name].dtype) for name, x in exact.items()}, tolerance=TOLERANCE)


@pytest.mark.usefixtures("small_tiles")
class TestAgainstTheOracle:
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_patterns(self, pattern):
        assert_like_the_oracle(*small(67), SINKS, pattern=pattern, layer=1, step=3)

    @pytest.mark.parametrize("layout", ["left-padded", "packed-and-padded", "interleaved", "all-padding"])
    def test_layouts(self, layout):
        inputs = small(37, batch=2)
        assert_like_the_oracle(*inputs, SINKS, pattern=union(8), documents=LAYOUTS[layout](37))

    @pytest.mark.parametrize("pattern", [Pattern.local(8), Pattern.stochastic(8, shape="block"), union(8)], ids=str)
    def test_both_ways(self, pattern):
        assert_like_the_oracle(*small(37), SINKS, pattern=pattern, causal=False)

    @pytest.mark.parametrize("pattern", [Pattern.stochastic(8), union(8, scope="prefix"), MOBA], ids=str)
    def test_query_positions(self, pattern):
        places = torch.tensor([36, 0, 3, 3, *range(5, 31)])
        inputs = small(37, queries=len(places))
        assert_like_the_oracle(*inputs, SINKS, pattern=pattern, query_positions=places)

    @pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=lambda h: f"{h[0]}over{h[1]}")
    @pytest.mark.parametrize("pattern", [Pattern.moba(16, 2), Pattern.stochastic(8, per_head=True)], ids=str)
    def test_grouped_queries(self, pattern, heads):
        assert_like_the_oracle(*small(33, heads=heads), pattern=pattern)

    @pytest.mark.parametrize("dims", [(1, 1), (31, 72), (72, 31), (256, 256)], ids=str)
    def test_head_dimensions(self, dims):
        assert_like_the_oracle(*small(33, dims=dims), pattern=Pattern.stochastic(8))

    @pytest.mark.parametrize("extra", [{"scale": -0.5}, {"softcap": 0.5, "scale": 2.0}], ids=str)
    def test_scale_and_softcap(self, extra):
        assert_like_the_oracle(*small(37), SINKS, pattern=union(8), **extra)

    @pytest.mark.parametrize("n", [1, 31, 32, 33, 65])
    def test_lengths_about_a_tile(self, n):
        assert_like_the_oracle(*small(n, heads=(1, 1)), pattern=Pattern.stochastic(8))

    @pytest.mark.parametrize("window", [1, 32, 36, 37])
    def test_windows(self, window):
        assert_like_the_oracle(*small(37, heads=(1, 1)), pattern=Pattern.stochastic(window))

    def test_strides(self):
        q, k, v = small(33)
        from_projection = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
        assert_like_the_oracle(*from_projection, v.mT.contiguous().mT, pattern=union(8))
        assert_like_the_oracle(q, k[:, :, :, :1].expand_as(k), v[:, :, :1].expand_as(v), pattern=Pattern.local(8))


@pytest.mark.usefixtures("small_tiles")
class TestPrecision:
    """Half precision is storage and products: sums are float32."""

    @pytest.mark.parametrize("dtypes", ["fff", "bbb", "hhh", "ffb", "bbf", "hfb"])
    def test_dtypes(self, dtypes):
        kinds = {"b": torch.bfloat16, "h": torch.float16, "f": torch.float32}
        inputs = [x.to(kinds[letter]) for x, letter in zip(small(33, dims=(16, 16)), dtypes, strict=True)]
        got = run("triton", *inputs, pattern=union(8))
        exact = run("reference", *(x.double() for x in inputs), device="cpu", pattern=union(8))
        assert [got[name].dtype for name in ("out", "lse")] == [inputs[2].dtype, torch.float32]
        assert [got[name].dtype for name in ("dq", "dk", "dv")] == [x.dtype for x in inputs]
        rounding = max(torch.finfo(x.dtype).eps for x in inputs)
        for name, x in exact.items():
            size = float(x.abs().max())
            torch.testing.assert_close(
                got[name].double(), x, rtol=0, atol=3 * rounding * size, msg=lambda m, n=name: n + m
            )

    @pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round as a GPU does")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("pattern", [Pattern.stochastic(16), Pattern.local(16, sinks=2)], ids=str)
    def test_error_is_at_most_twice_torchs(self, pattern, dtype):
        q, k, v = (x.to(DEVICE, dtype) for x in tensors(130, heads=(2, 2), dims=(16, 16)))
        mask = pattern.dense_mask(130).to(DEVICE)

        def by_torch(q, k, v):
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out, out[..., 0]

        def by(backend, q, k, v):
            out = attention(q, k, v, pattern, backend=backend)
            return out, out[..., 0]

        truth = outcome(partial(by, "reference"), *(x.double() for x in (q, k, v)))
        theirs, ours = outcome(by_torch, q, k, v), outcome(partial(by, "triton"), q, k, v)
        for name, exact in truth.items():
            assert ours[name].dtype == dtype
            error, allowed = (float((x[name].double() - exact).abs().max()) for x in (ours, theirs))
            assert error <= 2 * allowed + 1e-6, name

    def test_huge_scores(self):
        q, k, v = small(37, dtype=torch.float32)
        got = run("triton", q * 1e3, k * 1e3, v, pattern=union(8))
        exact = run("reference", q.double() * 1e3, k.double() * 1e3, v.double(), device="cpu", pattern=union(8))
        assert all(x.isfinite().all() for x in got.values())
        torch.testing.assert_close(got["out"].double(), exact["out"], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("small_tiles")
class TestNonFiniteValues:
    @pytest.mark.parametrize(
        ("which", "bad"), [("q", math.inf), ("k", math.inf), ("k", -math.inf), ("v", math.nan)], ids=str
    )
    def test_the_rows_that_see_it_are_spoilt_and_no_other(self, which, bad):
        pattern, at = union(8), 11
        inputs = dict(zip("qkv", small(37), strict=True))
        sees = pattern.dense_mask(37)[0, :, at] if which != "q" else torch.arange(37) == at
        cotangent = torch.where(sees, 0.0, 1.0).to(DTYPE)[None, None, :, None].expand(1, 2, 37, 8)

        def results():
            leaves = [x.detach().clone().to(DEVICE).requires_grad_() for x in inputs.values()]
            out = attention(*leaves, pattern, backend="triton")
            return [x.cpu() for x in (out, *torch.autograd.grad(out, leaves, cotangent.to(DEVICE)))]

        clean = results()
        inputs[which][:, :, at, 2] = bad
        out, *gradients = results()
        assert out[:, :, sees].isnan().all()
        torch.testing.assert_close(out[:, :, ~sees], clean[0][:, :, ~sees], rtol=TOLERANCE, atol=TOLERANCE)
        rows = torch.arange(37) != at
        for got, expected in zip(gradients, clean[1:], strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got[:, :, rows & ~sees], expected[:, :, rows & ~sees], rtol=1e-4, atol=1e-4)

    def test_rubbish_under_the_padding(self):
        documents = LAYOUTS["left-padded"](37)
        inputs = small(37, batch=2)
        spoilt = [torch.where((documents < 0)[:, None, :, None], math.nan, x) for x in inputs]
        got, expected = (run("triton", *x, SINKS, pattern=union(8), documents=documents) for x in (spoilt, inputs))
        assert_same(got, expected, tolerance=TOLERANCE)


@pytest.mark.usefixtures("small_tiles")
class TestGradients:
    def test_equal_bits_every_time(self):
        inputs = small(37, dtype=torch.float32)
        first, again = (run("triton", *inputs, pattern=union(8)) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_a_second_derivative_is_refused(self):
        q, k, v = (x.to(DEVICE).requires_grad_() for x in small(9))
        out = attention(q, k, v, Pattern.stochastic(3), backend="triton")
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(first.sum(), q)

    def test_of_the_lse_alone(self):
        leaves = [x.to(DEVICE).requires_grad_() for x in small(37)]
        got, expected = (
            torch.autograd.grad(attention(*leaves, union(8), backend=name, return_lse=True)[1].sum(), leaves[:2])
            for name in ("triton", "reference")
        )
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.usefixtures("small_tiles")
class TestCompilers:
    def test_operators_are_what_they_say(self):
        q, k, v = (x.to(DEVICE).requires_grad_() for x in small(33))
        documents = LAYOUTS["packed"](33)[:1].to(DEVICE)
        for step in (3, torch.tensor(3, device=DEVICE)):
            layout = make_layout(documents, None, batch=1, queries=33, keys=33, device=k.device)
            call = Call.checked(q, k, v, union(8), layout=layout, step=step)
            torch.library.opcheck(operator._forward, operator._arguments(call))

    def test_one_graph_for_all_steps_two_for_all_lengths_one_more_for_all_seeds(self):
        graphs = []

        def count(graph, _inputs):
            graphs.append(graph)
            return graph.forward

        @partial(torch.compile, backend=count, fullgraph=True)
        def compiled(q, k, v, step, pattern):
            return attention(q, k, v, pattern, step=step, backend="triton")

        def check(n, step, seed):
            inputs = [x.to(DEVICE) for x in small(n, heads=(1, 1))]
            pattern = Pattern.stochastic(8, seed=seed)
            got = compiled(*inputs, torch.tensor(step, device=DEVICE), pattern)
            assert torch.equal(got, attention(*inputs, pattern, step=step, backend="triton"))

        torch.compiler.reset()
        for step in range(3):
            check(20, step, 0)
        assert len(graphs) == 1
        for n in range(21, 41, 2):
            check(n, 0, 0)
        assert len(graphs) == 2
        for seed in range(1, 4):
            check(41, 0, seed)
        assert len(graphs) == 3

    def test_gradients_of_compiled_code(self):
        inputs = [x.to(DEVICE) for x in small(37)]
        call = partial(attention, backend="triton", return_lse=True)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        options = {"pattern": union(8), "documents": LAYOUTS["packed-and-padded"](37)[:1].to(DEVICE)}
        got, expected = (outcome(f, *inputs, SINKS.to(DEVICE), **options) for f in (compiled, call))
        assert_same(got, expected, tolerance=1e-12)


class TestRefusals:
    def test_in_words(self):
        q, k, v = (x.to(DEVICE) for x in small(9, dims=(257, 8)))
        with pytest.raises(ValueError, match="triton: head dimensions up to 256, got 257 and 8"):
            attention(q, k, v, Pattern.stochastic(3), backend="triton")
        q, k, v = (x.to(DEVICE) for x in small(9))
        with pytest.raises(ValueError, match="triton: decode=True"):
            attention(q, k, v, Pattern.stochastic(3), decode=True, backend="triton")

    def test_on_a_cpu_without_the_interpreter(self):
        program = (
            "import torch; from stochastic_attention import Pattern, attention; x = torch.ones(1, 1, 9, 4)\n"
            "attention(x, x, x, Pattern.local(2), backend='triton')"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "triton: on the CPU only where TRITON_INTERPRET=1 was set" in done.stderr

    def test_float64_on_a_gpu(self):
        """Asked of what a predicate reads, so that no GPU is needed."""
        cuda = SimpleNamespace(device=torch.device("cuda"))
        call = SimpleNamespace(permutes_each_prefix=False, q=cuda, compute_dtype=torch.float64)
        assert backend.unsupported(call) == "float32, bfloat16 and float16 only, got float64"


def a_call(pattern: Pattern, n: int, *, heads: tuple[int, int] = (1, 1), documents: Tensor | None = None) -> Call:
    q, k, v = tensors(n, batch=1, heads=heads, dims=(1, 1), dtype=torch.float32)
    layout = make_layout(documents, None, batch=1, queries=n, keys=n, device=k.device)
    return Call.checked(q, k, v, pattern, layout=layout)


class TestWork:
    @pytest.mark.parametrize("pattern", [p for p in all_patterns(window=8) if p.kind != "moba"], ids=str)
    def test_pairs_needed_are_the_keys_of_all_queries(self, pattern):
        work = count_work(a_call(pattern, 333, heads=(4, 2)), 32, 16)
        counts = keys_per_query(pattern, 333, heads=2).expand(2, -1)
        assert work.pairs_needed == 2 * int(counts.sum())
        assert work.tiles * 32 * 16 == work.pairs_computed >= work.pairs_needed
        assert work.masked_tiles <= work.tiles

    def test_a_full_causal_triangle(self):
        assert count_work(a_call(Pattern.full(), 512), 64, 64) == count_work(a_call(Pattern.local(512), 512), 64, 64)
        work = count_work(a_call(Pattern.full(), 512), 64, 64)
        assert (work.tiles, work.masked_tiles) == (36, 8)

    @pytest.mark.parametrize(
        ("pattern", "most"),
        [
            (Pattern.local(256), 1.3),
            (Pattern.stochastic(256, shape="block"), 1.15),
            (Pattern.stochastic(256), 2.1),
            (Pattern.stochastic(256, scope="prefix", shape="block"), 1.4),
            (Pattern.stochastic(256, scope="prefix"), 1.9),
            (Pattern.stochastic(256, shape="block", local=256, sinks=4), 1.5),
        ],
        ids=str,
    )
    def test_pairs_computed_over_needed(self, pattern, most):
        """The same at twice the length: linear."""
        ratios = []
        for n in (4096, 8192):
            work = count_work(a_call(pattern, n), 64, 64)
            ratios.append(work.pairs_computed / work.pairs_needed)
        assert max(ratios) <= most

    def test_sorting_groups_saves_tiles(self):
        call = a_call(Pattern.stochastic(256), 8192)
        sorted_tiles = count_work(call, 64, 64).tiles
        (p,) = lower(call)
        assert sorted_tiles < 0.95 * (8192 / 64) * ((2 * 256 + 64) / 64 + 0.5)
        assert schedule.schedule(call, p).group == 256


class TestKeptPlans:
    def test_found_by_what_they_depend_on(self, monkeypatch):
        made = []
        monkeypatch.setattr(plans, "_make", lambda call: made.append(call) or [schedule.schedule(call, *lower(call))])
        monkeypatch.setattr(plans, "_KEPT", plans._Kept(10**6))
        call = a_call(Pattern.stochastic(8), 40)
        assert plans.schedules(call) is plans.schedules(replace(call, q=call.q + 1))
        for other in ({"step": 1}, {"layer": 1}, {"causal": False}, {"pattern": Pattern.stochastic(8, seed=1)}):
            plans.schedules(replace(call, **other))
        assert len(made) == 5
        for step in (0, 1):
            plans.schedules(replace(call, pattern=Pattern.local(8), step=step))
        assert len(made) == 6  # what is not random does not depend on the step
        for _ in range(2):
            plans.schedules(replace(call, step=torch.tensor(1)))
            plans.schedules(a_call(Pattern.stochastic(8), 40, documents=torch.arange(40)[None] // 20))
        assert len(made) == 10  # what must be read is not compared

    def test_no_more_than_they_may_hold(self):
        kept = plans._Kept(10_000)
        for step in range(50):
            call = replace(a_call(Pattern.stochastic(8), 40), step=step)
            kept.get(plans._key(call), call)
        assert 1 < len(kept._schedules) < 50


class Seen(TorchDispatchMode):
    """The largest result of an operation, in elements, and whether the host read a value."""

    def __init__(self):
        super().__init__()
        self.elements, self.read = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        self.read |= "local_scalar_dense" in str(func) or "nonzero" in str(func)
        return result


@pytest.mark.parametrize("pattern", [Pattern.local(8, sinks=2), *(union(8, scope=s) for s in ("sequence", "prefix"))])
def test_planning_reads_nothing_and_holds_no_square(pattern):
    for n in (1024, 2048):
        call = a_call(pattern, n)
        with Seen() as seen:
            for p in lower(call):
                schedule.schedule(call, p).tiles(32, 16)
        assert not seen.read
        assert seen.elements <= 4 * n


@pytest.mark.slow
def test_random_calls():
    """Shapes, strides, dtypes, documents and positions, at the tiles of a GPU."""
    program = [sys.executable, "-W", "error", str(Path(__file__).parent / "fuzz.py"), "triton", "40", "0"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def compile_in_a_fresh_process(tmp_path, *arguments: str) -> list[dict]:
    program = [sys.executable, "-W", "error", "-m", "stochastic_attention.ops.triton.compiled", *arguments]
    file = tmp_path / "compiled.json"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*program, "--output", str(file)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["results"]["kernels"]


def assert_fits(kernels: list[dict]) -> None:
    """In shared memory; and in registers, but for a few bytes on 8.0 and for float32, which takes no matrix unit."""
    from stochastic_attention.ops.triton.compiled import SHARED

    for kernel in kernels:
        spilled = 512 if kernel["dtype"] == "float32" else 64 if kernel["capability"] == 80 else 0
        assert kernel["shared"] <= SHARED[kernel["capability"]], kernel
        assert kernel["spilled"] <= spilled, kernel


def test_kernels_compile_and_fit(tmp_path):
    kernels = compile_in_a_fresh_process(
        tmp_path, "--capabilities", "90", "--dtypes", "bfloat16", "--dims", "128", "--passes", "sliding"
    )
    assert len(kernels) == 3
    assert_fits(kernels)


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(tmp_path):
    kernels = compile_in_a_fresh_process(tmp_path)
    assert len(kernels) == 2 * 3 * 3 * 6 * 2
    assert_fits(kernels)
