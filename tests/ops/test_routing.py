"""The routing keys: the same bits everywhere and for ever, uniform, independent, and no other randomness touched."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch

from stochastic_attention import Pattern
from stochastic_attention.ops.routing import draw_distinct, inverse_permutation, permutation_ranks, routing_keys

from . import brute
from .cases import DRAWING, attention, tensors

# SHA-256 over the 4096 keys of a draw as little-endian 32-bit words. They must never change: a seed stands for results.
KNOWN = {
    (0, 0, 0, 0): "f49de0ba04246eb650c1200fcd8fe9a4c045658d5b504b5a61d2886c9ab9ac33",
    (1, 0, 0, 0): "7f8117376e3c6a1646dc9d3abd3e709cc3425cd204d664cdf22c839dcb2a7da0",
    (0, 1, 0, 0): "5a21f4b371e9dca4e568aad01203980242cf55beeb44efdeeb303e6bea7f44ac",
    (0, 0, 1, 0): "68c2ef78c9afeace869f381454f34ccef63a06b5fdd07b55df4fbf0d94f6c55c",
    (0, 0, 0, 1): "62dd9cbfb68d17ab728664568a89ce3ff9ca6d1689b2e5f155b3e16401da09bc",
    (2**63 - 1, 2**40 + 3, 31, 7): "b87d71f1811de890daee6b9f655bf1e1af3c363609c904c2709ff67749bd128c",
}


def digest(keys: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(key.to_bytes(4, "little") for key in keys.tolist())).hexdigest()


def words(seed: int, step: int, layer: int, head: int) -> dict[str, int]:
    return {"seed": seed, "step": step, "layer": layer, "head": head}


class TestTheSameBitsEverywhere:
    @pytest.mark.parametrize("draw", KNOWN, ids=str)
    def test_known_draws(self, draw):
        assert digest(routing_keys(torch.arange(4096), **words(*draw))) == KNOWN[draw]

    @pytest.mark.parametrize("draw", KNOWN, ids=str)
    def test_the_definition_in_unbounded_integers(self, draw):
        positions = [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 1]
        keys = routing_keys(torch.tensor(positions), **words(*draw))
        assert keys.tolist() == [brute.hash32(p, **words(*draw)) for p in positions]
        assert permutation_ranks(100, **words(*draw)).tolist() == list(brute.ranks(100, **words(*draw)))

    def test_largest_words(self):
        draw = words(2**63 - 1, 2**63 - 1, 2**32 - 1, 2**32 - 1)
        assert routing_keys(torch.tensor([2**32 - 1]), **draw).tolist() == [brute.hash32(2**32 - 1, **draw)]

    def test_heads_as_a_tensor(self):
        heads = torch.arange(3)[:, None]
        together = permutation_ranks(50, seed=5, layer=2, head=heads)
        assert together.tolist() == [list(brute.ranks(50, seed=5, layer=2, head=h)) for h in range(3)]

    # Loading the compiler warns of PyTorch's own deprecations.
    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_compiled_code(self, compiler):
        compiled = torch.compile(permutation_ranks_of_step, backend=compiler, fullgraph=True)
        for step in (0, 1, 2**40 + 3):
            assert torch.equal(compiled(torch.tensor(step)), permutation_ranks_of_step(step))

    def test_a_new_step_compiles_nothing(self):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(permutation_ranks_of_step, backend=counter, fullgraph=True)
        drawn = {tuple(compiled(torch.tensor(step)).tolist()) for step in range(3)}
        assert counter.frame_count == 1
        assert len(drawn) == 3

    @pytest.mark.parametrize("salt", ["1", "2"])
    def test_another_process(self, salt):
        program = (
            "import torch, stochastic_attention.ops.routing as r;"
            "torch.rand(3); print(r.permutation_ranks(64, seed=3, step=4, layer=5).tolist())"
        )
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(list(brute.ranks(64, seed=3, step=4, layer=5)))

    def test_defaults_of_torch_do_not_matter(self):
        expected = permutation_ranks(64, seed=3)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(permutation_ranks(64, seed=3), expected)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert torch.equal(permutation_ranks(64, seed=3, device=torch.device("cpu")), expected)


def permutation_ranks_of_step(step: int | torch.Tensor) -> torch.Tensor:
    return permutation_ranks(300, seed=7, step=step, layer=2)


class TestPermutations:
    @pytest.mark.parametrize("n", [0, 1, 2, 129, 200_000])
    def test_every_rank_once(self, n):
        ranks = permutation_ranks(n, seed=0)
        assert torch.equal(ranks.sort().values, torch.arange(n))
        assert torch.equal(inverse_permutation(inverse_permutation(ranks)), ranks)
        assert torch.equal(ranks[inverse_permutation(ranks)], torch.arange(n))

    def test_keys_of_a_draw_are_distinct(self):
        assert len(routing_keys(torch.arange(200_000), seed=0).unique()) == 200_000


def counting_up(word: str, draws: int, n: int) -> torch.Tensor:
    """Ranks [draws, n] of draws that differ in one word alone, which counts up from 0."""
    return permutation_ranks(n, **{"seed": 11, word: torch.arange(draws)[:, None]})


def chi_square_bound(freedom: int) -> float:
    """The 1 - 1e-4 quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


class TestUniformityAndIndependence:
    """Draws are fixed, so these cannot flake; each bound would fail a fair draw once in ten thousand."""

    N, DRAWS = 12, 6000

    def draws(self, word: str) -> torch.Tensor:
        """Ranks [DRAWS, N] where `word` alone counts up."""
        return counting_up(word, self.DRAWS, self.N)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "head"])
    def test_every_position_takes_every_rank_alike(self, word):
        ranks = self.draws(word)
        counts = torch.stack([ranks[:, p].bincount(minlength=self.N) for p in range(self.N)]).double()
        # Rows and columns of the table both sum to DRAWS: (N - 1)^2 degrees of freedom.
        assert chi_square(counts) * (self.N - 1) / self.N <= chi_square_bound((self.N - 1) ** 2)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "head"])
    @pytest.mark.parametrize("pair", [(0, 1), (3, 4), (0, 11)], ids=str)
    def test_every_pair_of_positions_takes_every_pair_of_ranks_alike(self, word, pair):
        ranks = self.draws(word)
        joint = (ranks[:, pair[0]] * self.N + ranks[:, pair[1]]).bincount(minlength=self.N**2).view(self.N, self.N)
        off_diagonal = joint[~torch.eye(self.N, dtype=torch.bool)].double()
        assert not joint.diagonal().any()
        assert chi_square(off_diagonal) <= chi_square_bound(self.N * (self.N - 1) - 1)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "head"])
    def test_all_orders_of_four_tokens_are_as_likely(self, word):
        orders = Counter(map(tuple, counting_up(word, self.DRAWS, 4).tolist()))
        assert len(orders) == 24
        assert chi_square(torch.tensor(list(orders.values())).double()) <= chi_square_bound(23)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "head"])
    def test_neighbouring_draws_are_independent(self, word):
        """Rank correlations of all pairs of 24 draws stay within 5 standard errors, 1 / sqrt(n - 1)."""
        n = 4096
        ranks = counting_up(word, 24, n).double()
        standard = (ranks - ranks.mean(-1, keepdim=True)) / ranks.std(-1, unbiased=False, keepdim=True)
        correlations = (standard @ standard.T / n)[~torch.eye(24, dtype=torch.bool)]
        assert correlations.abs().max() <= 5 / math.sqrt(n - 1)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "head"])
    def test_neighbouring_draws_agree_as_often_as_chance(self, word):
        """Two random permutations match at about Poisson(1) places: over 276 pairs 276 in all, within 5 deviations."""
        ranks = counting_up(word, 24, 4096)
        matches = sum(int((ranks[a] == ranks[b]).sum()) for a in range(24) for b in range(a))
        assert abs(matches - 276) <= 5 * math.sqrt(276)

    def test_words_are_not_interchangeable(self):
        draws = [
            permutation_ranks(64, **{"seed": 1, **word})
            for word in ({"step": 5}, {"layer": 5}, {"head": 5}, {"step": 5 << 32})
        ]
        assert len({tuple(ranks.tolist()) for ranks in draws}) == 4

    @pytest.mark.parametrize("scope", ["sequence", "prefix"])
    @pytest.mark.parametrize("shape", ["sliding", "block"])
    def test_every_pair_of_tokens_meets_as_often(self, scope, shape):
        """The chance that the correction divides by: (2 * window - 1) / L, but for the edges of "sliding"."""
        n, w, draws = 64, 4, 400
        masks = sum(
            Pattern.stochastic(w, scope=scope, shape=shape, seed=s).dense_mask(n)[0].double() for s in range(draws)
        )
        pairs = masks[40:, :40].flatten() / draws
        near = (2 * w - 1) * n - w * (w - 1) - n if shape == "sliding" else (2 * w - 1) * n
        chance = near / (n * (n - 1))
        deviation = math.sqrt(chance * (1 - chance) / draws)
        assert float(pairs.mean()) == pytest.approx(chance, abs=deviation / 5)
        assert float(pairs.min()) > chance - 5 * deviation
        assert float(pairs.max()) < chance + 5 * deviation


class TestDistinctNumbers:
    def test_different_ones_from_the_range_and_all_where_there_are_no_more(self):
        below = torch.arange(200)
        for row, b in zip(draw_distinct(below, 7, seed=3, step=2**40, layer=2).tolist(), below.tolist(), strict=True):
            numbers = [x for x in row if x >= 0]
            assert len(set(numbers)) == len(numbers) == min(b, 7)
            assert max(row) < b
            assert numbers == row[7 - len(numbers) :]

    def test_more_draws_than_numbers_draw_no_others(self):
        below = torch.arange(6)
        few, many = (draw_distinct(below, draws, seed=1).sort().values for draws in (5, 9))
        assert torch.equal(many[:, 4:], few)

    @pytest.mark.parametrize("word", ["seed", "step", "layer", "below"])
    def test_all_subsets_are_as_likely(self, word):
        """Three of seven numbers, drawn 6,000 times; the number of the block stands in for a word by itself."""
        if word == "below":
            drawn = draw_distinct(torch.arange(7, 6007), 1, seed=11)[:, 0] * 7 // torch.arange(7, 6007)
            assert chi_square(drawn.bincount(minlength=7).double()) <= chi_square_bound(6)
            return
        drawn = torch.cat([draw_distinct(torch.tensor([7]), 3, **{"seed": 11, word: k}) for k in range(6000)])
        subsets = Counter(map(tuple, drawn.sort().values.tolist()))
        assert len(subsets) == 35
        assert chi_square(torch.tensor(list(subsets.values())).double()) <= chi_square_bound(34)


class TestTheOpDrawsNothingElse:
    @pytest.mark.parametrize("pattern", DRAWING, ids=str)
    def test_global_random_states_are_left_alone(self, backend, pattern):
        before = torch.get_rng_state(), random.getstate()
        q, k, v = tensors(33, grad=True)
        attention(q, k, v, pattern, backend=backend).sum().backward()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]

    def test_global_random_states_do_not_matter(self, backend):
        inputs = tensors(33)
        first = attention(*inputs, Pattern.stochastic(4), backend=backend)
        torch.rand(3)
        random.random()
        assert torch.equal(attention(*inputs, Pattern.stochastic(4), backend=backend), first)

    @pytest.mark.parametrize("pattern", DRAWING, ids=str)
    def test_steps_layers_and_seeds_change_the_output(self, backend, pattern):
        inputs = tensors(33)
        outs = [
            attention(*inputs, pattern.seeded(seed), step=step, layer=layer, backend=backend)
            for seed, step, layer in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
        ]
        assert all(not torch.allclose(outs[a], outs[b]) for a in range(4) for b in range(a))

    @pytest.mark.parametrize("pattern", DRAWING, ids=str)
    def test_a_step_is_the_same_as_a_number_and_as_a_tensor(self, backend, pattern):
        inputs = tensors(33)
        for step in (0, 7, 2**40):
            as_number = attention(*inputs, pattern, step=step, backend=backend)
            as_tensor = attention(*inputs, pattern, step=torch.tensor(step), backend=backend)
            assert torch.equal(as_number, as_tensor)

    # Tracing reads .grad of intermediate tensors, and PyTorch warns of that.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
    @pytest.mark.parametrize("pattern", DRAWING, ids=str)
    def test_a_compiled_caller_gets_a_new_draw_every_step(self, pattern):
        torch._dynamo.reset()
        q, k, v = tensors(33, grad=True)

        def model(q, step):
            return attention(q * 2, k, v, pattern, step=step, backend="blocked") + 1

        compiled = torch.compile(model, backend="aot_eager")
        outs = []
        for step in range(3):
            got, expected = (f(q, torch.tensor(step)) for f in (compiled, model))
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, expected)]
            for one, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            outs.append(got)
        assert not torch.allclose(outs[0], outs[1])
        assert not torch.allclose(outs[1], outs[2])

    def test_compiled_with_shared_buffers(self):
        torch._dynamo.reset()
        x = torch.randn(1, 2, 33, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

        def model(x):
            q, k, v = x.chunk(3, dim=-1)
            return attention(q, k, v, Pattern.stochastic(4), backend="blocked") + attention(
                q, q, q, Pattern.local(4), backend="blocked"
            )

        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x), rtol=1e-12, atol=1e-12)
