"""Decoding: what decode=True means, and what the `gather` backend promises beside the right numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stochastic_attention import Pattern, attention
from stochastic_attention.ops import gather, rank_tables
from stochastic_attention.ops.backends import unsupported
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout

from .cases import DRAWING, MOBA, all_patterns, assert_same, outcome, stochastic_patterns, tensors, union

PATTERNS = [pattern for pattern in all_patterns(window=4) if pattern.kind != "moba"]


def permutes_each_prefix(pattern: Pattern) -> bool:
    """Whether decode=True has a meaning of its own."""
    return pattern.kind == "stochastic" and pattern.scope == "sequence"


def make_call(pattern: Pattern, keys: int, places: torch.Tensor, **options) -> Call:
    q, k, v = tensors(keys, queries=places.shape[-1])
    layout = make_layout(None, places, batch=len(k), queries=q.shape[2], keys=keys, device=k.device)
    return Call.checked(q, k, v, pattern, layout=layout, **options)


def reason(pattern: Pattern, keys: int, queries: int, *, backend: str = "gather", **options) -> str | None:
    return unsupported(make_call(pattern, keys, torch.arange(keys - queries, keys), **options), backend)


class TestDecode:
    """decode=True: each query is the newest token of its document."""

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_each_query_is_the_last_row_of_its_prefix(self, backend, pattern, padded):
        q, k, v = tensors(23)
        documents = torch.stack([torch.arange(23) >= 2, torch.arange(23) >= 0]).long() - 1 if padded else None
        places = torch.tensor([2, 3, 4, 5, 8, 9, 15, 21])
        if reason(pattern, 23, len(places), backend=backend, decode=True):
            pytest.skip("the backend does not take this call")
        options = {"layer": 3, "step": 8}
        got = attention(
            q[:, :, places], k, v, pattern, query_positions=places, documents=documents, decode=True, backend=backend,
            **options,
        )  # fmt: skip
        for place, row in zip(places.tolist(), got.unbind(2), strict=True):
            prefix = (x[:, :, : place + 1] for x in (q, k, v))
            own = None if documents is None else documents[:, : place + 1]
            last = attention(*prefix, pattern, documents=own, backend="reference", **options)[:, :, -1]
            torch.testing.assert_close(row, last, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", [p for p in all_patterns(4) if not permutes_each_prefix(p)], ids=str)
    def test_it_only_matters_in_scope_sequence(self, fast_backend, pattern):
        if reason(pattern, 23, 3, backend=fast_backend):
            pytest.skip("the backend does not take this call")
        q, k, v = tensors(23, queries=3)
        options = {"query_positions": torch.tensor([4, 21, 22]), "backend": fast_backend}
        assert torch.equal(attention(q, k, v, pattern, decode=True, **options), attention(q, k, v, pattern, **options))

    @pytest.mark.parametrize("pattern", stochastic_patterns(window=4), ids=str)
    def test_any_number_of_queries_in_bounded_slices(self, monkeypatch, pattern):
        """A whole text, each token routed as when it was the newest; slices of one query give the same."""
        inputs = tensors(70)
        results = []
        for elements in (gather._ELEMENTS_AT_ONCE, 1):
            monkeypatch.setattr(gather, "_ELEMENTS_AT_ONCE", elements)
            results.append(outcome(attention, *inputs, pattern=pattern, decode=True, return_lse=True))
        expected = outcome(attention, *inputs, pattern=pattern, decode=True, return_lse=True, backend="reference")
        for result in results:
            assert_same(result, expected)


class TestWhichCallsItTakes:
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_few_queries_among_many_keys(self, pattern):
        assert [reason(pattern, 100, queries) for queries in (1, 3, 64)] == [None] * 3
        assert reason(pattern, 100, 65) == "at most 64 queries, got 65"

    def test_what_is_refused_is_refused_in_words(self):
        assert "MoBA" in (reason(MOBA, 100, 1) or "")
        assert "causal" in (reason(Pattern.local(4), 100, 1, causal=False) or "")
        assert "themselves" in (reason(Pattern.local(4), 10, 10) or "")
        with pytest.raises(ValueError, match="gather: the queries are the keys themselves"):
            attention(*tensors(10), Pattern.local(4), backend="gather")

    def test_decode_splits_the_work_with_blocked(self):
        alone, shared = Pattern.stochastic(4), Pattern.stochastic(4, scope="prefix")
        assert [reason(alone, 100, n, decode=True) for n in (1, 65, 100)] == [None] * 3
        assert reason(alone, 100, 100, backend="blocked", decode=True) is not None
        for pattern in (shared, Pattern.stochastic(100), Pattern.local(4), MOBA):
            assert reason(pattern, 100, 100, backend="blocked", decode=True) is None


class LargestFloats(TorchDispatchMode):
    """Records the elements of the largest floating tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not func.is_view:
            self.elements = max([self.elements, *found])
        return result


class TestCost:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(
        "pattern",
        [Pattern.local(32, sinks=2), Pattern.bigbird(8, 3, local=32, sinks=2), *stochastic_patterns(32)],
        ids=str,
    )
    def test_a_step_reads_as_many_keys_from_a_long_cache_as_from_a_short_one(self, pattern, packed):
        read = []
        for n in (1024, 32768):
            q, k, v = tensors(n, queries=1, batch=1, heads=(2, 2), dtype=torch.float32)
            documents = torch.arange(n)[None] * 3 // n if packed else None
            with LargestFloats() as largest:
                attention(q, k, v, pattern, query_positions=torch.tensor([n - 5]), documents=documents)
            read.append(largest.elements)
        assert read[0] == read[1] <= 2 * 8 * (2 * 32 + 3 + 32)

    def test_the_measure_sees_a_pass_over_all_keys(self):
        q, k, v = tensors(1024, queries=1, batch=1, heads=(2, 2))
        with LargestFloats() as largest:
            attention(q, k, v, Pattern.stochastic(32), query_positions=torch.tensor([1000]), backend="blocked")
        assert largest.elements >= k.numel()


class TestExactness:
    """Local windows, blocks and scope "prefix": neither chunks, nor later keys, nor the room behind change a bit."""

    @pytest.mark.parametrize("bad", [1e3, math.nan, -math.inf], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "pattern", [p for p in PATTERNS if p.scope == "prefix" or p.kind in ("local", "bigbird")], ids=str
    )
    def test_chunks_and_later_keys(self, pattern, dtype, bad):
        n = 80
        q, k, v = tensors(n, dtype=dtype)
        results = []
        for chunk, room in ((1, 0), (3, 0), (64, 0), (3, 48)):
            cache = [torch.full((2, 2, n + room, 8), bad, dtype=dtype) for _ in range(2)]
            outs = []
            for places in torch.arange(n).split(chunk):
                for filled, x in zip(cache, (k, v), strict=True):
                    filled[:, :, places] = x[:, :, places]
                outs.append(
                    attention(q[:, :, places], *cache, pattern, query_positions=places, layer=2, backend="gather")
                )
            results.append(torch.cat(outs, dim=2))
        assert all(torch.equal(other, results[0]) for other in results[1:])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_asking_for_a_gradient_changes_no_number(self, pattern, dtype):
        """A layer under activation checkpointing runs without gradients first, and is recomputed with them."""
        q, k, v = (x.to(dtype) for x in tensors(37, queries=5))
        options = {"query_positions": torch.tensor([3, 9, 20, 30, 36]), "backend": "gather", "return_lse": True}
        plain = attention(q, k, v, pattern, **options)
        found = attention(*(x.clone().requires_grad_() for x in (q, k, v)), pattern, **options)
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))

    @pytest.mark.parametrize("order", [1, 2], ids=["first derivative", "second derivative"])
    def test_one_tensor_for_queries_keys_and_values(self, order):
        x = tensors(12, heads=(2, 2), dims=(4, 4))[0]
        found = []
        for backend in ("gather", "reference"):
            leaf = x.clone().requires_grad_()
            places = {"query_positions": torch.arange(12).flip(0), "backend": backend}
            result = attention(leaf, leaf, leaf, union(3), **places).square().sum()
            for _ in range(order):
                (result,) = torch.autograd.grad(result, leaf, create_graph=True)
                found.append(result)
                result = result.square().sum()
        torch.testing.assert_close(found[:order], found[order:], rtol=1e-10, atol=1e-10)


class TestRankTables:
    OPTIONS = {"seed": 3, "step": 5, "layer": 7, "heads": 2, "device": torch.device("cpu")}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch):
        self.kept = rank_tables._Kept(2**20)
        monkeypatch.setattr(rank_tables, "_KEPT", self.kept)
        self.drawn = []
        draw = rank_tables._draw
        monkeypatch.setattr(
            rank_tables, "_draw", lambda *args, **options: (self.drawn.append(args), draw(*args, **options))[1]
        )

    def test_a_table_is_drawn_once(self):
        first = rank_tables.rank_table(8, 3, **self.OPTIONS)
        assert rank_tables.rank_table(8, 3, **self.OPTIONS) is first
        step = torch.tensor(self.OPTIONS["step"])
        assert rank_tables.rank_table(8, 3, **{**self.OPTIONS, "step": step}) is first
        assert len(self.drawn) == 1

    def test_one_with_more_levels_serves_those_who_need_fewer(self):
        large = rank_tables.rank_table(8, 4, **self.OPTIONS)
        assert rank_tables.rank_table(8, 2, **self.OPTIONS) is large
        larger = rank_tables.rank_table(8, 5, **self.OPTIONS)
        assert torch.equal(larger[..., : large.shape[-1]], large)
        assert rank_tables.rank_table(8, 4, **self.OPTIONS) is larger

    @pytest.mark.parametrize(("word", "other"), [("seed", 4), ("step", 6), ("layer", 8), ("heads", 3)])
    def test_every_word_counts(self, word, other):
        first = rank_tables.rank_table(8, 3, **self.OPTIONS)
        second = rank_tables.rank_table(8, 3, **{**self.OPTIONS, word: other})
        assert not torch.equal(second, first)
        assert len(self.drawn) == 2

    def test_the_least_used_make_room(self):
        size = rank_tables.rank_table(1024, 3, **self.OPTIONS).nbytes
        for layer in range(100):
            rank_tables.rank_table(1024, 3, **{**self.OPTIONS, "layer": layer})
            rank_tables.rank_table(1024, 3, **{**self.OPTIONS, "layer": 0})
        held = [table.nbytes for _, table in self.kept._tables.values()]
        assert 2**20 - size < sum(held) <= 2**20
        assert len(self.drawn) == 100

    def test_a_table_first_drawn_in_inference_mode_can_be_differentiated_through(self):
        q, k, v = tensors(23, queries=1, grad=True)
        with torch.inference_mode():
            attention(q, k, v, union(4), query_positions=torch.tensor([20]))
        attention(q, k, v, union(4), query_positions=torch.tensor([20])).sum().backward()
        assert len(self.drawn) == 1
        assert k.grad.any()

    def test_a_tracers_fake_table_is_not_kept(self):
        with FakeTensorMode():
            rank_tables.rank_table(8, 3, **self.OPTIONS)
        assert type(rank_tables.rank_table(8, 3, **self.OPTIONS)) is torch.Tensor


class TestCompiled:
    """One graph a shape, with eager's numbers wherever the query stands and whatever is drawn."""

    N = 64

    def inputs(self, place: int) -> dict[str, torch.Tensor]:
        documents = torch.stack([(torch.arange(self.N) <= place).long() - 1, torch.arange(self.N) // 40])
        return {"query_positions": torch.tensor([place]), "documents": documents}

    def assert_one_graph(self, pattern: Pattern, compiler: str) -> None:
        torch._dynamo.reset()
        q, k, v = tensors(self.N, queries=1, dtype=torch.float32)
        k[0, :, 60:] = math.nan

        def step(q, query_positions, documents):
            places = {"query_positions": query_positions, "documents": documents}
            return attention(q, k, v, pattern, layer=2, step=7, decode=True, return_lse=True, **places)

        compiled = torch.compile(step, fullgraph=True, backend=compiler)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for place in (0, 3, 4, 5, 17, 59):
                for got, expected in zip(compiled(q, **self.inputs(place)), step(q, **self.inputs(place)), strict=True):
                    torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_positions(self, pattern):
        self.assert_one_graph(pattern, "eager")

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("pattern", [Pattern.full(), union(4), union(4, scope="prefix")], ids=str)
    def test_positions_by_inductor(self, pattern):
        self.assert_one_graph(pattern, "inductor")

    @pytest.mark.parametrize("drawing", DRAWING, ids=str)
    def test_steps_layers_and_seeds(self, drawing):
        torch._dynamo.reset()
        q, k, v = tensors(self.N, queries=1)

        def one(seed, layer, step):
            return attention(q, k, v, drawing.seeded(seed), layer=layer, step=step, query_positions=torch.tensor([60]))

        compiled = torch.compile(one, fullgraph=True, backend="eager")
        words = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (1, 0, 0)]
        outs = [compiled(*drawn) for drawn in words]
        outs += [compiled(0, 0, torch.tensor(step)) for step in (3, 4)]
        expected = [one(*drawn) for drawn in (*words, (0, 0, 3), (0, 0, 4))]
        for got, want in zip(outs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert len({float(out.sum()) for out in outs}) == len(outs)

    # Tracing reads .grad of intermediate tensors, and PyTorch warns of that.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
    def test_gradients(self):
        torch._dynamo.reset()
        inputs = tensors(self.N, queries=1, grad=True)

        def one(q, k, v):
            return attention(q, k, v, union(4), **self.inputs(50)).square().sum()

        got = torch.autograd.grad(torch.compile(one, fullgraph=True, backend="aot_eager")(*inputs), inputs)
        for gradient, expected in zip(got, torch.autograd.grad(one(*inputs), inputs), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
