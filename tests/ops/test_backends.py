"""Every backend against the oracle: forward, log-sum-exp and every gradient, over shapes, layouts and dtypes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stochastic_attention import Pattern, documents_from_cu_seqlens

from . import brute
from .cases import (
    LAYOUTS,
    MOBA,
    all_patterns,
    assert_same,
    attention,
    is_causal_only,
    outcome,
    stochastic_patterns,
    tensors,
    union,
)

SINKS = torch.tensor([0.5, -20.0, 20.0, -0.3], dtype=torch.float64)


def run(backend: str, *inputs: Tensor, **options) -> dict[str, Tensor]:
    return outcome(partial(attention, backend=backend, return_lse=True), *inputs, **options)


def assert_like_the_oracle(backend: str, *inputs: Tensor, tolerance: float = 1e-10, **options) -> None:
    assert_same(run(backend, *inputs, **options), run("reference", *inputs, **options), tolerance=tolerance)


class TestAgainstTheOracle:
    """One axis at a time, in float64, with gradients of q, k, v and the sinks through both results."""

    @pytest.mark.parametrize("window", [1, 4, 5, 64, 128, "n-1", "n"])
    @pytest.mark.parametrize("n", [1, 2, 3, 7, 37, 127, 128, 129, 131])
    def test_lengths_and_windows(self, fast_backend, n, window):
        width = {"n-1": max(n - 1, 1), "n": n}.get(window, window)
        inputs = tensors(n, batch=1, heads=(2, 1), dims=(4, 4))
        for pattern in (Pattern.local(width), *stochastic_patterns(width)):
            assert_like_the_oracle(fast_backend, *inputs, pattern=pattern, layer=1, step=3)

    @pytest.mark.parametrize(
        "pattern", [Pattern.full(), Pattern.moba(100, 2), Pattern.local(10, sinks=1), *stochastic_patterns(10)], ids=str
    )
    def test_a_length_of_many_tiles(self, fast_backend, pattern):
        assert_like_the_oracle(fast_backend, *tensors(600, batch=1, heads=(2, 1), dims=(4, 4)), pattern=pattern)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_layouts(self, fast_backend, pattern, layout):
        for n in (9, 67):
            inputs = (*tensors(n), SINKS)
            assert_like_the_oracle(fast_backend, *inputs, pattern=pattern, documents=LAYOUTS[layout](n), layer=5)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("pattern", [p for p in all_patterns(window=4) if not is_causal_only(p)], ids=str)
    def test_both_ways(self, fast_backend, pattern, layout):
        for n in (1, 9, 67):
            options = {"pattern": pattern, "documents": LAYOUTS[layout](n), "causal": False}
            assert_like_the_oracle(fast_backend, *tensors(n), SINKS, **options)

    @pytest.mark.parametrize(
        "places",
        [
            torch.tensor([40]),
            torch.tensor([0]),
            torch.arange(17, 29),
            torch.tensor([[3, 40, 0, 3], [1, 1, 8, 39]]),
            torch.arange(40, -1, -1),
        ],
        ids=["last", "first", "chunk", "per-row", "reversed"],
    )
    @pytest.mark.parametrize("layout", ["single", "left-padded", "packed-and-padded", "interleaved"])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_query_positions(self, fast_backend, pattern, layout, places):
        inputs = (*tensors(41, queries=places.shape[-1]), SINKS)
        options = {"pattern": pattern, "documents": LAYOUTS[layout](41), "query_positions": places}
        assert_like_the_oracle(fast_backend, *inputs, **options)

    @pytest.mark.parametrize("pattern", [p for p in all_patterns(window=4) if not is_causal_only(p)], ids=str)
    def test_query_positions_both_ways(self, fast_backend, pattern):
        places = torch.tensor([[3, 40, 0, 3], [1, 1, 8, 39]])
        options = {"pattern": pattern, "documents": LAYOUTS["packed"](41), "query_positions": places, "causal": False}
        assert_like_the_oracle(fast_backend, *tensors(41, queries=4), **options)

    @pytest.mark.parametrize(
        "heads",
        [(8, 2), (6, 3), (8, 1), (4, 4), (2, 1), (3, 1), (5, 1), (7, 1), (10, 2)],
        ids=lambda h: f"{h[0]}over{h[1]}",
    )
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_grouped_queries(self, fast_backend, pattern, heads):
        assert_like_the_oracle(fast_backend, *tensors(33, batch=1, heads=heads), pattern=pattern)

    @pytest.mark.parametrize("dims", [(1, 1), (8, 3), (31, 72), (72, 31), (80, 80), (96, 1), (256, 256)], ids=str)
    @pytest.mark.parametrize(
        "pattern", [Pattern.local(4), MOBA, union(4), union(4, scope="prefix", shape="block")], ids=str
    )
    def test_head_dimensions(self, fast_backend, pattern, dims):
        assert_like_the_oracle(fast_backend, *tensors(33, batch=1, heads=(2, 1), dims=dims), pattern=pattern)

    @pytest.mark.parametrize(
        "extra",
        [{"scale": 1.7}, {"scale": -0.5}, {"softcap": 0.5}, {"softcap": 30.0, "scale": 2.0}],
        ids=lambda extra: "+".join(f"{name}={value}" for name, value in extra.items()),
    )
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_scale_and_softcap(self, fast_backend, pattern, extra):
        assert_like_the_oracle(fast_backend, *tensors(33), SINKS, pattern=pattern, **extra)

    @pytest.mark.parametrize("pattern", stochastic_patterns(window=4), ids=str)
    def test_routing_arguments(self, fast_backend, pattern):
        for step in (2**40 + 1, torch.tensor(6)):
            options = {"pattern": pattern, "layer": 2**32 - 1, "step": step, "documents": LAYOUTS["packed"](33)}
            assert_like_the_oracle(fast_backend, *tensors(33), **options)

    @pytest.mark.parametrize("pattern", all_patterns(window=2), ids=str)
    def test_empty_and_single_token_documents(self, fast_backend, pattern):
        documents = documents_from_cu_seqlens(torch.tensor([0, 0, 1, 1, 6, 6]), 6)
        q, k, v = tensors(6, batch=1)
        packed = run(fast_backend, q, k, v, pattern=pattern, documents=documents)
        for start, stop in ((0, 1), (1, 6)):
            alone = attention(*(x[:, :, start:stop] for x in (q, k, v)), pattern, backend="reference")
            torch.testing.assert_close(packed["out"][:, :, start:stop], alone, rtol=0, atol=1e-12)
        assert_like_the_oracle(fast_backend, q, k, v, pattern=pattern, documents=documents)


class TestGradients:
    """Against finite differences, so that oracle and backend cannot be wrong alike."""

    @pytest.mark.parametrize("n", [1, 9, 13])
    @pytest.mark.parametrize("layout", ["single", "packed-and-padded"])
    @pytest.mark.parametrize("pattern", [Pattern.local(4, sinks=1), *stochastic_patterns(4)], ids=str)
    def test_out_and_lse(self, backend, pattern, layout, n):
        inputs = (
            *tensors(n, batch=2, heads=(2, 1), dims=(2, 3), grad=True),
            torch.tensor([0.5, -1.0]).double().requires_grad_(),
        )
        call = partial(
            attention, pattern=pattern, documents=LAYOUTS[layout](n), softcap=2.0, backend=backend, return_lse=True
        )

        def finite(q, k, v, sinks):
            out, lse = call(q, k, v, sink_logits=sinks)
            return out, lse[lse.isfinite()]

        assert torch.autograd.gradcheck(finite, inputs, fast_mode=True)

    @pytest.mark.parametrize("heads", [(8, 2), (6, 3), (8, 1)], ids=lambda h: f"{h[0]}-on-{h[1]}")
    @pytest.mark.parametrize("n", [1, 2, 7, 37, 127, 128, 129, 600])
    def test_out_at_lengths_that_fill_no_tile(self, fast_backend, n, heads):
        """Two packed documents in one row, padding on both sides in the other."""
        inputs = tensors(n, heads=heads, dims=(2, 3), grad=True)
        token = torch.arange(n)
        documents = torch.stack([token * 3 // (2 * n), torch.where((token < n // 5) | (token > n - n // 7), -1, 0)])
        for pattern in (Pattern.stochastic(10), union(10, scope="prefix", shape="block")):
            call = partial(attention, pattern=pattern, documents=documents, backend=fast_backend)
            assert torch.autograd.gradcheck(call, inputs, fast_mode=True)

    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, Pattern.stochastic(4)], ids=str)
    def test_both_ways_or_chosen(self, backend, pattern):
        inputs = tensors(9, batch=1, heads=(2, 1), dims=(2, 2), grad=True)
        causal = is_causal_only(pattern)
        call = partial(attention, pattern=pattern, causal=causal, backend=backend, return_lse=True)
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)

    @pytest.mark.parametrize("scope", ["sequence", "prefix"])
    def test_a_gated_pair_of_branches(self, backend, scope):
        draw = torch.Generator().manual_seed(0)
        size = 4
        x = torch.randn(1, 9, size, generator=draw, dtype=torch.float64, requires_grad=True)
        weights = [torch.randn(size, size, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(5)]

        def gated(x, w_q, w_k, w_v, w_sa, w_swa):
            q, k, v = ((x @ w).unflatten(-1, (2, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
            branches = (Pattern.stochastic(3, scope=scope), w_sa), (Pattern.local(3), w_swa)
            total = 0
            for pattern, gate in branches:
                y = attention(q, k, v, pattern, backend=backend).transpose(1, 2).flatten(2)
                total = total + torch.sigmoid(x @ gate) * y
            return total

        assert torch.autograd.gradcheck(gated, (x, *weights), fast_mode=True)

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_nothing_flows_back_from_the_past(self, backend, pattern):
        q, k, v = tensors(13, grad=True)
        out = attention(q, k, v, pattern, backend=backend)
        for gradient in torch.autograd.grad(out[:, :, :5].sum(), (q, k, v)):
            assert not gradient[:, :, 5:].any()

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_repeats_bit_for_bit(self, backend, pattern):
        inputs = tensors(67, dtype=torch.float32)
        first = run(backend, *inputs, pattern=pattern)
        for _ in range(2):
            again = run(backend, *inputs, pattern=pattern)
            assert all(torch.equal(first[name], again[name]) for name in first)

    @pytest.mark.parametrize("wanted", ["q", "k", "v", "sink_logits"])
    def test_one_input_alone_asks_for_a_gradient(self, fast_backend, wanted):
        names = ("q", "k", "v", "sink_logits")
        inputs = dict(zip(names, (*tensors(37), SINKS), strict=True))
        leaf = inputs[wanted] = inputs[wanted].clone().requires_grad_()
        got, expected = (
            torch.autograd.grad(attention(**inputs, pattern=union(4), backend=name).square().sum(), leaf)[0]
            for name in (fast_backend, "reference")
        )
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)

    def test_a_second_derivative_is_right_or_refused(self, fast_backend):
        """As a penalty beside a loss: alone, autograd itself would find that nothing leads back to q."""
        q, k, v = tensors(9, batch=1, heads=(1, 1), dims=(2, 2), grad=True)

        def penalised(backend):
            out = attention(q, k, v, Pattern.stochastic(3), backend=backend)
            (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            return torch.autograd.grad(first.square().sum() + out.sum(), q)[0]

        try:
            got = penalised(fast_backend)
        except RuntimeError as error:
            assert "has no second derivative" in str(error)  # noqa: PT017 - one backend or the other
        else:
            torch.testing.assert_close(got, penalised("reference"))

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing_changes_nothing(self, backend, use_reentrant):
        from torch.utils.checkpoint import checkpoint

        def two_layers(q, k, v):
            out = attention(q, k, v, Pattern.stochastic(4), layer=0, step=5, backend=backend)
            return attention(out, k, v, Pattern.stochastic(4), layer=1, step=5, backend=backend)

        q, k, v = tensors(37, heads=(2, 2), grad=True)
        plain = torch.autograd.grad(two_layers(q, k, v).square().sum(), (q, k, v))
        again = checkpoint(two_layers, q, k, v, use_reentrant=use_reentrant, preserve_rng_state=False)
        again.square().sum().backward()
        assert all(torch.equal(x.grad, gradient) for x, gradient in zip((q, k, v), plain, strict=True))


class TestStorage:
    """The same numbers in another place of memory give the same result."""

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_strides(self, fast_backend, pattern):
        q, k, v = tensors(33)
        expected = run(fast_backend, q, k, v, pattern=pattern)
        from_projection = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        wide = [torch.stack([torch.full_like(x, math.nan), x], dim=-1)[..., 1] for x in (q, k, v)]
        column_major = [x.mT.contiguous().mT for x in (q, k, v)]
        for inputs in (from_projection, wide, column_major):
            assert_same(run(fast_backend, *inputs, pattern=pattern), expected, tolerance=1e-12)

    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, union(4)], ids=str)
    def test_shared_and_expanded_buffers(self, fast_backend, pattern):
        def gradients(name):
            draw = torch.Generator().manual_seed(0)
            x, chunks, expanded = (
                torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
                for shape in ((2, 2, 33, 8), (2, 2, 33, 24), (1, 1, 33, 8))
            )
            total = attention(x, x, x, pattern, backend=name).square().sum()
            total = total + attention(*chunks.chunk(3, dim=-1), pattern, backend=name).square().sum()
            spread = expanded.expand(2, 2, -1, -1)
            total = total + attention(x, spread, spread, pattern, backend=name).square().sum()
            return torch.autograd.grad(total, (x, chunks, expanded))

        for got, want in zip(gradients(fast_backend), gradients("reference"), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    def test_an_expanded_cotangent(self, fast_backend):
        q, k, v = tensors(33, grad=True)
        got, want = (
            torch.autograd.grad(attention(q, k, v, union(4), backend=name).sum(), (q, k, v))
            for name in (fast_backend, "reference")
        )
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("backend", [None, "blocked"])
    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, union(4), union(4, scope="prefix")], ids=str)
    def test_on_the_device_of_the_inputs_whatever_the_default_is(self, backend, pattern):
        """Memory elsewhere, handed to a kernel by its address, would end the process."""
        leaves = q, k, v = tensors(33, grad=True)
        for queries, options in ((q, {"backend": backend}), (q[:, :, :2], {"query_positions": torch.tensor([3, 32])})):
            found = []
            for device in ("cpu", "meta"):
                with torch.device(device):
                    out = attention(queries, k, v, pattern, **options)
                    found.append((out, *torch.autograd.grad(out.sum(), leaves)))
            assert all(map(torch.equal, *found))

    def test_inputs_are_left_as_they_were(self, backend):
        q, k, v = tensors(33)
        k[:, :, 3] = math.nan
        documents = LAYOUTS["left-padded"](33)
        before = [x.clone() for x in (q, k, v, documents)]
        run(backend, q, k, v, pattern=union(4), documents=documents)
        for x, was in zip((q, k, v, documents), before, strict=True):
            torch.testing.assert_close(x, was, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(
        ("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 0), (2, 0, 5)], ids=["no-rows", "no-tokens", "no-queries"]
    )
    @pytest.mark.parametrize("documented", [False, True])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_nothing_in_nothing_out(self, backend, pattern, documented, batch, queries, keys):
        inputs = (*tensors(keys, batch=batch, queries=queries), SINKS)
        options = {"documents": torch.zeros(batch, keys, dtype=torch.int64)} if documented else {}
        if queries != keys:
            options["query_positions"] = torch.zeros(queries, dtype=torch.int64)
        result = run(backend, *inputs, pattern=pattern, **options)
        assert result["out"].shape == (batch, 4, queries, 8)
        assert result["lse"].shape == (batch, 4, queries)
        assert all(not result[name].any() for name in ("dq", "dk", "dv", "d_sink_logits"))


class TestPrecision:
    """Half precision is storage, sums are float32 or better. The yardstick: torch's attention on the same inputs."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "pattern",
        [
            Pattern.full(),
            Pattern.local(16),
            Pattern.stochastic(16),
            Pattern.stochastic(16, scope="prefix"),
            Pattern.stochastic(16, shape="block", local=8, sinks=2),
        ],
        ids=str,
    )
    def test_error_is_at_most_twice_torchs(self, backend, pattern, dtype):
        n = 130
        places = torch.arange(n - 64 if backend == "gather" else 0, n)  # in one call: chunks would be summed in dtype
        inputs = tensors(n, queries=len(places), heads=(2, 2), dims=(16, 16), dtype=dtype)
        mask = pattern.dense_mask(n)[:, places]

        def by_torch(q, k, v):
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out, out[..., 0]

        def by(backend, q, k, v):
            out = attention(q, k, v, pattern, query_positions=places, backend=backend)
            return out, out[..., 0]

        truth = outcome(partial(by, "reference"), *(x.double() for x in inputs))
        theirs = outcome(by_torch, *inputs)
        ours = outcome(partial(by, backend), *inputs)
        for name, exact in truth.items():
            assert ours[name].dtype == dtype
            error, allowed = (float((x[name].double() - exact).abs().max()) for x in (ours, theirs))
            assert error <= 2 * allowed + 1e-6, name

    @pytest.mark.parametrize("dtypes", ["ffb", "bbf", "hfb", "dfb", "bbb", "hhh", "fff", "ddd"])
    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, union(4)], ids=str)
    def test_mixed_dtypes(self, backend, pattern, dtypes):
        kinds = {"b": torch.bfloat16, "h": torch.float16, "f": torch.float32, "d": torch.float64}
        inputs = [x.to(kinds[letter]) for x, letter in zip(tensors(33), dtypes, strict=True)]
        got = run(backend, *inputs, pattern=pattern)
        exact = run("reference", *(x.double() for x in inputs), pattern=pattern)
        assert got["out"].dtype == inputs[2].dtype
        assert got["lse"].dtype == (torch.float64 if "d" in dtypes else torch.float32)
        torch.testing.assert_close(got["lse"].double(), exact["lse"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got["out"], exact["out"].to(inputs[2].dtype))
        for name, x in zip(("dq", "dk", "dv"), inputs, strict=True):
            assert got[name].dtype == x.dtype

    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, union(4)], ids=str)
    def test_autocast_changes_nothing(self, backend, pattern):
        q, k, v = tensors(33, dtype=torch.float32)
        plain = run(backend, q, k, v.bfloat16(), pattern=pattern)

        def under_autocast(*inputs, **options):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return attention(*inputs, **options, backend=backend, return_lse=True)

        cast = outcome(under_autocast, q, k, v.bfloat16(), pattern=pattern)
        assert all(torch.equal(plain[name], cast[name]) for name in plain)

    @pytest.mark.parametrize("pattern", [Pattern.local(4), MOBA, union(4)], ids=str)
    def test_a_backward_inside_autocast(self, pattern):
        """A backward of one's own must switch autocast off. Autograd's follows PyTorch's rule: leave autocast first."""
        inputs = tensors(33, dtype=torch.float32)
        plain = run("blocked", *inputs, pattern=pattern)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = run("blocked", *inputs, pattern=pattern)
        assert all(torch.equal(plain[name], cast[name]) for name in plain)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_scores_of_tens_of_thousands(self, backend, pattern, dtype):
        q, k, v = tensors(33, dtype=dtype)
        draw = torch.Generator().manual_seed(3)
        size = torch.where(torch.rand(q.shape[:-1], generator=draw) < 0.5, -3e4, 3e4)[..., None].to(dtype)
        unit = torch.zeros_like(q)
        unit[..., 0] = 1.0
        q, k = unit * size, k * 0 + unit[:, :2]
        k = k + 1e-4 * torch.randn(k.shape, generator=draw).to(dtype)
        got = run(backend, q, k, v, pattern=pattern, scale=1.0)
        exact = run("reference", q.double(), k.double(), v.double(), pattern=pattern, scale=1.0)
        assert all(x.isfinite().all() for x in got.values())
        close = {torch.float64: 1e-7, torch.float32: 2e-2, torch.bfloat16: 5e-2}[dtype]
        torch.testing.assert_close(got["out"].double(), exact["out"], rtol=close, atol=close)

    def test_a_key_outside_has_no_weight_whatever_its_score(self, backend):
        q, k, v = tensors(33, batch=1, heads=(1, 1), dtype=torch.float32)
        outside = 7
        mask = Pattern.stochastic(4).dense_mask(33)[0]
        expected = attention(q, k, v, Pattern.stochastic(4), backend=backend)
        k[:, :, outside], v[:, :, outside] = 1e4 * q[:, :, -1], 1e30
        got = attention(q, k, v, Pattern.stochastic(4), backend=backend)
        blind = ~mask[:, outside]
        assert blind.any()
        assert torch.equal(got[:, :, blind], expected[:, :, blind])

    @pytest.mark.parametrize(
        "pattern", [Pattern.local(16), Pattern.stochastic(16), Pattern.stochastic(16, scope="prefix")], ids=str
    )
    def test_more_tokens_than_16_bits_count(self, fast_backend, pattern):
        n = 33728
        q, k, v = tensors(n, batch=1, heads=(1, 1), dims=(16, 16), dtype=torch.float32)
        places = torch.tensor([0, 15, 16, 32767, 32768, n - 1])
        if fast_backend == "gather":
            out = torch.zeros_like(q)
            out[:, :, places] = attention(q[:, :, places], k, v, pattern, query_positions=places, backend=fast_backend)
        else:
            out = attention(q, k, v, pattern, backend=fast_backend)
        assert out.isfinite().all()
        for i in places.tolist():
            seen = list(brute.visible(pattern, [0] * n, i))
            scores = (k[0, 0, seen] @ q[0, 0, i]).double() * 16**-0.5
            torch.testing.assert_close(
                out[0, 0, i].double(), scores.softmax(0) @ v[0, 0, seen].double(), rtol=1e-5, atol=1e-5
            )


class TestSinks:
    @pytest.mark.parametrize("pattern", [Pattern.full(), Pattern.local(4), Pattern.stochastic(4), MOBA], ids=str)
    def test_a_sink_is_one_more_column(self, backend, pattern):
        """Equal to attention rescaled by sigmoid(lse - sink), which is what a concatenated column comes to."""
        q, k, v = tensors(33)
        out, lse = attention(q, k, v, pattern, backend=backend, return_lse=True)
        sunk, same_lse = attention(q, k, v, pattern, sink_logits=SINKS, backend=backend, return_lse=True)
        torch.testing.assert_close(sunk, out * torch.sigmoid(lse - SINKS[:, None])[..., None], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(same_lse, lse, rtol=0, atol=1e-12)

    def test_a_sink_of_minus_infinity_is_none(self, backend):
        q, k, v = tensors(33)
        none = torch.full((4,), -math.inf, dtype=torch.float64)
        without, absent = run(backend, q, k, v, pattern=union(4)), run(backend, q, k, v, none, pattern=union(4))
        assert not any(absent.pop(name).any() for name in ("d_sink_logits", "d_sink_logits of out"))
        assert_same(absent, without, tolerance=1e-12)

    def test_sinks_in_half_precision(self, backend):
        q, k, v = tensors(33)
        sinks = SINKS.to(torch.bfloat16)
        got = run(backend, q, k, v, sinks, pattern=union(4))
        expected = run("reference", q, k, v, sinks.double(), pattern=union(4))
        assert got["d_sink_logits"].dtype == torch.bfloat16
        torch.testing.assert_close(got["out"], expected["out"])


class TestEmptyRowsAndNonFiniteValues:
    """A key outside N(i) is as if it were not there; a non-finite one inside spoils that row alone."""

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_padding_queries_give_zero(self, backend, pattern):
        documents = LAYOUTS["left-padded"](33)
        result = run(backend, *tensors(33), SINKS, pattern=pattern, documents=documents)
        padding = (documents < 0)[:, None].expand(-1, 4, -1)
        assert not result["out"][padding].any()
        assert (result["lse"][padding] == -math.inf).all()
        assert not result["dq"][padding].any()
        assert all(not result[name][padding[:, :2]].any() for name in ("dk", "dv"))
        assert all(result[name].isfinite().all() for name in ("out", "dq", "dk", "dv", "d_sink_logits"))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
    @pytest.mark.parametrize("layout", ["left-padded", "right-padded", "interleaved"])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_rubbish_under_the_padding(self, backend, pattern, layout, bad):
        documents = LAYOUTS[layout](33)
        inputs = tensors(33)
        expected = run(backend, *inputs, SINKS, pattern=pattern, documents=documents)
        spoilt = [torch.where((documents < 0)[:, None, :, None], bad, x) for x in inputs]
        got = run(backend, *spoilt, SINKS, pattern=pattern, documents=documents)
        assert_same(got, expected, tolerance=1e-12)

    @pytest.mark.parametrize("which", ["k", "v"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
    @pytest.mark.parametrize("pattern", [p for p in all_patterns(window=4) if p.kind != "moba"], ids=str)
    def test_a_bad_key_or_value_spoils_the_rows_that_see_it(self, backend, pattern, which, bad):
        n, at = 37, 11
        inputs = dict(zip("qkv", tensors(n, batch=1, heads=(2, 2)), strict=True))
        clean = attention(**inputs, pattern=pattern, backend=backend)
        inputs[which] = inputs[which].clone()
        inputs[which][:, :, at, 2] = bad
        sees = pattern.dense_mask(n, heads=2)[None, :, :, at].expand(1, 2, n)
        assert sees.any()
        out = attention(**inputs, pattern=pattern, backend=backend)
        assert out[sees].isnan().all()
        torch.testing.assert_close(out[~sees], clean[~sees], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("which", ["k", "v"])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_a_bad_key_shows_beside_huge_scores(self, backend, pattern, which):
        """The other keys' weights must not round the bad one's away."""
        inputs = dict(zip("qkv", tensors(37, dtype=torch.float32), strict=True))
        inputs["q"], inputs["k"] = inputs["q"].abs() * 100, inputs["k"].abs() * 100
        inputs[which][:, :, 36] = math.nan
        out = attention(**inputs, pattern=pattern, backend=backend)
        assert out[:, :, 36].isnan().all()

    @pytest.mark.parametrize("which", ["k", "v"])
    @pytest.mark.parametrize("pattern", [p for p in all_patterns(window=4) if p.kind != "moba"], ids=str)
    def test_gradients_of_rows_that_do_not_see_it(self, backend, pattern, which):
        n, at = 37, 11
        inputs = dict(zip("qkv", tensors(n, batch=1, heads=(2, 2)), strict=True))
        sees = pattern.dense_mask(n, heads=2)[None, :, :, at].expand(1, 2, n)
        cotangent = torch.where(sees, 0.0, 1.0).double()[..., None].expand(1, 2, n, 8)

        def gradients():
            leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
            out = attention(**leaves, pattern=pattern, backend=backend)
            return torch.autograd.grad(out, list(leaves.values()), cotangent)

        clean = gradients()
        inputs[which] = inputs[which].clone()
        inputs[which][:, :, at] = math.nan
        for got, expected in zip(gradients(), clean, strict=True):
            rows = torch.arange(n) != at
            torch.testing.assert_close(
                got[0, :, rows & ~sees[0, 0]], expected[0, :, rows & ~sees[0, 0]], rtol=1e-10, atol=1e-10
            )

    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_a_bad_query_spoils_its_row(self, backend, pattern, bad):
        q, k, v = tensors(37)
        clean = attention(q, k, v, pattern, backend=backend)
        q[0, 1, 11, 3] = bad
        out = attention(q, k, v, pattern, backend=backend)
        assert out[0, 1, 11].isnan().all()
        out[0, 1, 11] = clean[0, 1, 11]
        torch.testing.assert_close(out, clean, rtol=1e-12, atol=1e-12)

    def test_a_single_key_gives_the_query_no_gradient(self, backend):
        for rows in (34, 76, 146):
            q, k, v = tensors(1, queries=rows, grad=True)
            places = torch.zeros(rows, dtype=torch.int64)
            out = attention(q, k, v, Pattern.stochastic(4), query_positions=places, backend=backend)
            dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
            assert dq.abs().max() < 1e-12
            assert dk.abs().max() < 1e-10
            assert dv.isfinite().all()
