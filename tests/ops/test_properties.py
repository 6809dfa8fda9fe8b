"""What users may rely on whatever the backend: batches, padding, growing texts, documents, limits of each window."""

from __future__ import annotations

import pytest
import torch

from stochastic_attention import Pattern, documents_from_mask
from stochastic_attention.ops import rank_tables

from .cases import all_patterns, attention, is_causal_only, stochastic_patterns, tensors

GROWING = [pattern for pattern in all_patterns(window=4) if pattern.kind != "stochastic" or pattern.scope == "prefix"]
BOTH_WAYS = [pattern for pattern in all_patterns(window=4) if not is_causal_only(pattern)]


class TestBatchesAndPadding:
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("pads", [1, 3, 17])
    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_a_row_alone_is_the_row_in_a_padded_batch(self, backend, pattern, pads, side):
        n = 20
        alone = tensors(n, batch=1, seed=1)
        batch = list(tensors(n + pads, batch=3, seed=2))
        own = slice(pads, None) if side == "left" else slice(0, n)
        mask = torch.ones(3, n + pads, dtype=torch.int64)
        mask[1] = 0
        mask[1, own] = 1
        for x, row in zip(batch, alone, strict=True):
            x[1, :, own] = row[0]
        together = attention(*batch, pattern, documents=documents_from_mask(mask), layer=3, step=4, backend=backend)
        expected = attention(*alone, pattern, layer=3, step=4, backend=backend)
        torch.testing.assert_close(together[1:2, :, own], expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", BOTH_WAYS, ids=str)
    def test_also_when_keys_on_both_sides_are_seen(self, backend, pattern):
        alone = tensors(20, batch=1, seed=1)
        padded = [
            torch.cat([torch.full_like(x[:, :, :5], 1e3), x, torch.full_like(x[:, :, :3], -1e3)], dim=2) for x in alone
        ]
        documents = torch.tensor([[-1] * 5 + [0] * 20 + [-1] * 3])
        got = attention(*padded, pattern, documents=documents, causal=False, backend=backend)[:, :, 5:25]
        expected = attention(*alone, pattern, causal=False, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_rows_of_a_batch_do_not_depend_on_their_place(self, backend, pattern):
        inputs = tensors(20, batch=3)
        order = torch.tensor([2, 0, 1])
        straight = attention(*inputs, pattern, backend=backend)
        shuffled = attention(*(x[order] for x in inputs), pattern, backend=backend)
        torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("pattern", BOTH_WAYS, ids=str)
    def test_documents_are_alone(self, backend, pattern, causal):
        """A packed document is routed and attended as if it came by itself, whatever its id and its neighbours."""
        first, second = tensors(11, batch=1, seed=1), tensors(23, batch=1, seed=2)
        packed = [torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)]
        documents = torch.tensor([[4] * 11 + [2] * 23])
        got = attention(*packed, pattern, documents=documents, causal=causal, backend=backend)
        expected = [attention(*x, pattern, causal=causal, backend=backend) for x in (first, second)]
        torch.testing.assert_close(got, torch.cat(expected, dim=2), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_unwritten_cache_rows_are_ignored(self, backend, pattern):
        """A static cache: 12 tokens written, 3 rows of rubbish behind them, queries at the written tokens."""
        q, k, v = tensors(12)
        cached = [torch.cat([x, torch.full_like(x[:, :, :3], 1e3)], dim=2) for x in (k, v)]
        documents = (torch.arange(15) < 12).long().expand(2, -1) - 1
        got = attention(q, *cached, pattern, documents=documents, query_positions=torch.arange(12), backend=backend)
        torch.testing.assert_close(got, attention(q, k, v, pattern, backend=backend), rtol=1e-12, atol=1e-12)


class TestTime:
    """No output knows the future, and a growing text keeps its outputs where the pattern promises that."""

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_a_changed_token_changes_no_earlier_output(self, backend, pattern):
        q, k, v = tensors(24)
        before = attention(q, k, v, pattern, backend=backend)
        for x in (q, k, v):
            x[:, :, 20] += 1.0
        after = attention(q, k, v, pattern, backend=backend)
        assert torch.equal(after[:, :, :20], before[:, :, :20])
        assert not torch.equal(after[:, :, 20], before[:, :, 20])

    @pytest.mark.parametrize("pattern", GROWING, ids=str)
    def test_a_longer_text_keeps_its_outputs(self, backend, pattern):
        inputs = tensors(53)
        whole = attention(*inputs, pattern, backend=backend)
        for n in (1, 3, 4, 5, 8, 9, 16, 17, 33, 52):
            short = attention(*(x[:, :, :n] for x in inputs), pattern, backend=backend)
            torch.testing.assert_close(short, whole[:, :, :n], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", [p for p in GROWING if p.is_random], ids=str)
    def test_a_longer_text_keeps_its_keys(self, pattern):
        whole = pattern.dense_mask(70, heads=2)
        for n in (1, 4, 5, 17, 69):
            assert torch.equal(pattern.dense_mask(n, heads=2), whole[:, :n, :n])

    @pytest.mark.parametrize("chunk", [1, 3, 5, 12])
    @pytest.mark.parametrize("pattern", GROWING, ids=str)
    def test_chunks_with_a_cache_are_one_pass(self, backend, pattern, chunk):
        q, k, v = tensors(24)
        whole = attention(q, k, v, pattern, backend=backend)
        for begin in range(0, 24, chunk):
            end = min(begin + chunk, 24)
            places = torch.arange(begin, end)
            cached = (x[:, :, :end] for x in (k, v))
            part = attention(q[:, :, begin:end], *cached, pattern, query_positions=places, backend=backend)
            torch.testing.assert_close(part, whole[:, :, begin:end], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("pattern", all_patterns(window=4), ids=str)
    def test_a_query_by_itself_is_its_row_of_the_square_call(self, backend, pattern):
        q, k, v = tensors(16)
        whole = attention(q, k, v, pattern, backend=backend)
        for places in (torch.tensor([15]), torch.tensor([11, 12, 13, 14, 15]), torch.tensor([[7, 2], [0, 7]])):
            index = places.expand(2, -1)[:, None, :, None].expand(-1, 4, -1, 8)
            got = attention(q.gather(2, index), k, v, pattern, query_positions=places, backend=backend)
            torch.testing.assert_close(got, whole.gather(2, index), rtol=1e-12, atol=1e-12)

    def test_early_tokens_of_scope_prefix_see_their_whole_past(self):
        for shape in ("sliding", "block"):
            mask = Pattern.stochastic(8, scope="prefix", shape=shape).dense_mask(40)[0]
            assert torch.equal(mask[:8], Pattern.full().dense_mask(40)[0, :8])

    def test_scope_sequence_does_depend_on_the_length(self):
        """The property that the documentation denies to scope "sequence", so that the denial stays true."""
        pattern = Pattern.stochastic(4)
        assert not torch.equal(pattern.dense_mask(40)[:, :39, :39], pattern.dense_mask(39))


class TestLimits:
    @pytest.mark.parametrize("n", [1, 2, 3, 29])
    @pytest.mark.parametrize("excess", [0, 1, 99, 2**20, None], ids=lambda e: "unlimited" if e is None else f"n+{e}")
    @pytest.mark.parametrize("seed", [0, 2**63 - 1])
    def test_a_window_of_n_is_full_attention(self, backend, n, excess, seed):
        inputs = tensors(n)
        full = attention(*inputs, Pattern.full(), backend=backend)
        window = None if excess is None else n + excess
        patterns = [Pattern.local(window), Pattern.local(window, sinks=2)]
        patterns += [
            Pattern.stochastic(window, scope=scope, shape=shape, seed=seed, correction=correction)
            for scope in ("sequence", "prefix")
            for shape in ("sliding", "block")
            for correction in (0.0, 0.5)
        ]
        for pattern in patterns:
            got = attention(*inputs, pattern, backend=backend)
            torch.testing.assert_close(got, full, rtol=1e-12, atol=1e-12, msg=lambda m, p=pattern: f"{p}: {m}")

    @pytest.mark.parametrize("n", [1, 2, 29])
    def test_also_when_keys_on_both_sides_are_seen(self, backend, n):
        inputs = tensors(n)
        full = attention(*inputs, Pattern.full(), causal=False, backend=backend)
        for pattern in (Pattern.local(n), Pattern.stochastic(n), Pattern.stochastic(n, shape="block")):
            got = attention(*inputs, pattern, causal=False, backend=backend)
            torch.testing.assert_close(got, full, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("blocks", [8, 9, 2**31 - 1])
    def test_choosing_every_block_is_full_attention(self, backend, blocks):
        inputs = tensors(29)
        full = attention(*inputs, Pattern.full(), backend=backend)
        patterns = [Pattern.bigbird(4, blocks - 1), Pattern.bigbird(4, blocks - 1, local=3, sinks=2)]
        if backend != "gather":
            patterns.append(Pattern.moba(block_size=4, top_k=blocks))
        for pattern in patterns:
            got = attention(*inputs, pattern, backend=backend)
            torch.testing.assert_close(got, full, rtol=1e-12, atol=1e-12, msg=lambda m, p=pattern: f"{p}: {m}")

    def test_full_attention_is_torchs(self, backend):
        q, k, v = tensors(29)
        for causal in (True, False):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            got = attention(q, k, v, Pattern.full(), causal=causal, backend=backend)
            torch.testing.assert_close(got, theirs, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("scope", ["sequence", "prefix"])
    def test_a_window_of_one_returns_the_values(self, backend, scope):
        q, k, v = tensors(29)
        values = v.repeat_interleave(2, dim=1)
        for pattern in (Pattern.local(1), Pattern.stochastic(1, scope=scope)):
            assert torch.equal(attention(q, k, v, pattern, backend=backend), values)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [1, 4, 5, 28])
    def test_identity_ranks_are_the_local_window(self, backend, monkeypatch, window, causal):
        def identity(positions, *, head=0, **_words):
            return positions + 0 * torch.as_tensor(head)

        modules = ["routing", "reference", "plan", "triton.keys"]
        for name in modules:
            module = pytest.importorskip(f"stochastic_attention.ops.{name}")
            if hasattr(module, "routing_keys"):
                monkeypatch.setattr(module, "routing_keys", identity)
        monkeypatch.setattr(rank_tables, "_KEPT", rank_tables._Kept(0))
        inputs = tensors(29)
        got = attention(*inputs, Pattern.stochastic(window), causal=causal, backend=backend)
        expected = attention(*inputs, Pattern.local(window), causal=causal, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("window", [1, 4, 5, 11, 12])
    def test_local_is_the_sliding_window_of_hugging_face(self, window):
        masking = pytest.importorskip("transformers.masking_utils")
        rules = {
            True: masking.sliding_window_causal_mask_function(window),
            False: masking.sliding_window_bidirectional_mask_function(window),
        }
        for causal, rule in rules.items():
            places = torch.arange(12)
            expected = rule(0, 0, places[:, None], places[None, :])
            assert torch.equal(Pattern.local(window).dense_mask(12, causal=causal)[0], expected)

    def test_two_kinds_of_one_neighbourhood_agree(self, backend):
        """A union whose stochastic part adds nothing new is the local window with sinks."""
        inputs = tensors(29)
        got = attention(*inputs, Pattern.stochastic(1, local=5, sinks=2), backend=backend)
        expected = attention(*inputs, Pattern.local(5, sinks=2), backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class TestNeighbourhoods:
    @pytest.mark.parametrize(
        "pattern", [*stochastic_patterns(window=4), Pattern.bigbird(4, 2, local=5, sinks=1)], ids=str
    )
    def test_a_key_outside_changes_nothing_and_a_key_inside_does(self, backend, pattern):
        q, k, v = tensors(37, batch=1, heads=(2, 2))
        mask = pattern.dense_mask(37, heads=2).expand(2, -1, -1)
        before = attention(q, k, v, pattern, backend=backend)
        for key in (0, 17, 36):
            changed = k.clone()
            changed[:, :, key] += 0.5
            moved = (attention(q, changed, v, pattern, backend=backend) - before)[0].abs().amax(-1) > 1e-12
            several = mask.sum(-1) > 1
            assert torch.equal(moved & several, mask[:, :, key] & several)

    def test_per_head_keys_differ_and_a_group_shares(self, backend):
        q, k, v = tensors(37, batch=1, heads=(4, 2))
        mask = Pattern.stochastic(4, per_head=True).dense_mask(37, heads=2)
        assert not torch.equal(mask[0], mask[1])
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        out = attention(q, k, v, Pattern.stochastic(4, per_head=True), backend=backend)
        for head in range(4):
            seen = mask[head // 2].double()
            torch.testing.assert_close(out[0, head], seen @ v[0, head // 2] / seen.sum(-1, keepdim=True))

    def test_heads_share_by_default(self):
        assert Pattern.stochastic(4).dense_mask(37, heads=8).shape == (1, 37, 37)

    @pytest.mark.parametrize("shape", ["sliding", "block"])
    def test_mean_count_of_keys(self, shape):
        """Ranks fix the number of near pairs, so the mean is exact: about the window, for both shapes alike."""
        n, w = 256, 16
        masks = [Pattern.stochastic(w, shape=shape, seed=seed).dense_mask(n)[0] for seed in range(3)]
        near_pairs = {"sliding": (2 * w - 1) * n - w * (w - 1), "block": 2 * w * n}[shape]
        assert [int(mask.sum()) for mask in masks] == [(near_pairs + n) // 2] * 3

    def test_late_tokens_see_twice_the_mean_in_scope_sequence(self):
        n, w = 256, 16
        last = [int(Pattern.stochastic(w, seed=seed).dense_mask(n)[0, -1].sum()) for seed in range(20)]
        assert sum(last) / 20 == pytest.approx(2 * w - 1, rel=0.1)

    def test_scope_prefix_gives_both_shapes_about_the_same_keys(self):
        counts = [
            Pattern.stochastic(4, scope="prefix", shape=shape).dense_mask(512)[0, 32:].sum()
            for shape in ("sliding", "block")
        ]
        assert int(counts[0]) == pytest.approx(int(counts[1]), rel=0.2)

    def test_the_bias_weighs_sampled_keys_only(self, backend):
        """With equal scores a sampled key weighs (1 / p) ** correction times a certain one."""
        n, w, correction = 29, 3, 0.5
        pattern = Pattern.stochastic(w, local=4, sinks=1, correction=correction)
        q, k, v = tensors(n, batch=1, heads=(1, 1))
        out = attention(torch.zeros_like(q), k, v, pattern, backend=backend)
        certain = Pattern.local(4, sinks=1).dense_mask(n)[0]
        sampled = pattern.dense_mask(n)[0] & ~certain
        weights = certain + sampled.double() * (n / (2 * w - 1)) ** correction
        torch.testing.assert_close(out[0, 0], weights @ v[0, 0] / weights.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)

    def test_bigbird_sees_its_own_block_and_different_past_ones(self):
        size, draws, n = 4, 3, 64
        for layer in range(20):
            mask = Pattern.bigbird(size, draws).dense_mask(n, layer=layer)[0]
            blocks = mask.view(n // size, size, n // size, size)
            for own, rows in enumerate(blocks):
                assert torch.equal(rows[:, own], torch.ones(size, size, dtype=torch.bool).tril())
                past = rows[:, :own].transpose(0, 1).flatten(1)
                assert torch.equal(past.all(-1), past.any(-1))  # whole blocks, for all queries of the block alike
                assert int(past.all(-1).sum()) == min(draws, own)
                assert not rows[:, own + 1 :].any()

    def test_moba_keeps_the_own_block_and_the_best_past_ones(self, backend):
        n, size = 20, 4
        q, k, v = tensors(n, batch=1, heads=(1, 1))
        k[0, 0, 4:8] += 10 * q[0, 0, 18]
        out = attention(q, k, v, Pattern.moba(block_size=size, top_k=2), backend=backend)
        seen = [4, 5, 6, 7, 16, 17, 18]
        weights = (k[0, 0, seen] @ q[0, 0, 18] * 8**-0.5).softmax(0)
        torch.testing.assert_close(out[0, 0, 18], weights @ v[0, 0, seen], rtol=1e-12, atol=1e-12)
        own = attention(q, k, v, Pattern.moba(block_size=size, top_k=1), backend=backend)
        starts = torch.arange(n) // size * size
        alone = torch.stack(
            [
                attention(*(x[:, :, s : i + 1] for x in (q, k, v)), Pattern.full())[0, 0, -1]
                for i, s in enumerate(starts)
            ]
        )
        torch.testing.assert_close(own[0, 0], alone, rtol=1e-12, atol=1e-12)

    def test_lse_merges_disjoint_parts(self, backend):
        """Two halves of the keys, merged by their log-sum-exp, are the whole: what a caller needs the lse for."""
        q, k, v = tensors(16)
        halves = [
            attention(
                q, k, v, Pattern.full(), causal=False, documents=d, query_positions=p, backend=backend, return_lse=True
            )
            for d, p in (
                ((torch.arange(16) < 9).long().expand(2, -1) - 1, torch.zeros(16, dtype=torch.int64)),
                ((torch.arange(16) >= 9).long().expand(2, -1) - 1, torch.full((16,), 15)),
            )
        ]
        weights = torch.stack([lse for _, lse in halves]).softmax(0)
        merged = sum(w[..., None] * out for w, (out, _) in zip(weights, halves, strict=True))
        whole = attention(q, k, v, Pattern.full(), causal=False, backend=backend)
        torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
