import pytest
import torch

from stochastic_attention import Pattern, attention
from stochastic_attention.evaluation.budget import Queries, closest, expected_keys, sees_everything
from stochastic_attention.evaluation.requests import Profile

DETERMINISTIC = [
    Pattern.full(),
    Pattern.local(5),
    Pattern.local(5, sinks=4),
    Pattern.local(50, sinks=4),
    Pattern.strided(4, 3),
    Pattern.strided(None, 5),
    Pattern.strided(3, 4, local=6, sinks=2),
    Pattern.strided(None, 7, local=7, sinks=3),
    Pattern.strided(3, 4, sinks=5),
    Pattern.strided(50, 1, local=2),
]
RANDOM = [
    Pattern.stochastic(5),
    Pattern.stochastic(5, shape="block"),
    Pattern.stochastic(5, scope="prefix"),
    Pattern.stochastic(3, scope="prefix", shape="block"),
    Pattern.stochastic(4, local=6, sinks=2),
    Pattern.stochastic(4, sinks=3, scope="prefix"),
    Pattern.stochastic(60, local=2),
    Pattern.bigbird(4, 2),
    Pattern.bigbird(4, 3, local=7, sinks=2),
    Pattern.bigbird(3, 1, local=2, sinks=4),
    Pattern.bigbird(9, 20),
]


@pytest.mark.parametrize("n", [1, 7, 37])
@pytest.mark.parametrize("pattern", DETERMINISTIC, ids=str)
def test_expected_keys_are_the_mask_rows_of_a_pattern_without_chance(pattern, n):
    expected = expected_keys(pattern, torch.arange(n), torch.full((n,), n))
    assert torch.equal(expected, pattern.dense_mask(n)[0].sum(-1).double())


@pytest.mark.parametrize("pattern", RANDOM, ids=str)
def test_expected_keys_are_the_mean_over_many_permutations(pattern):
    n, draws = 37, 400
    counts = torch.stack([pattern.dense_mask(n, layer=layer)[0].sum(-1).double() for layer in range(draws)])
    expected = expected_keys(pattern, torch.arange(n), torch.full((n,), n))
    allowance = 5 * counts.std(0) / draws**0.5 + 1e-9
    assert ((counts.mean(0) - expected).abs() <= allowance).all()


@pytest.mark.parametrize(("block_size", "top_k"), [(4, 1), (4, 3), (5, 2), (64, 2)])
def test_expected_keys_of_moba_count_the_own_block_and_the_chosen_ones(block_size, top_k):
    n = 23
    counted = [i % block_size + 1 + min(top_k - 1, i // block_size) * block_size for i in range(n)]
    pattern = Pattern.moba(block_size, top_k)
    assert expected_keys(pattern, torch.arange(n), torch.full((n,), n)).tolist() == counted


def test_w_eff_counts_all_queries_and_w_scored_the_last_ones():
    # Window 3: keys 1 2 3 3 and 1 2 3 3 3 3. Scored: the last 1 of four queries (twice), the last 5 of six.
    queries = Queries(Profile({(4, 1): 2, (6, 5): 1}))
    budget = queries.measured([Pattern.local(3)] * 2)
    assert budget.w_eff == pytest.approx((2 * 9 + 15) / 14)
    assert budget.w_scored == pytest.approx((2 * 3 + 14) / 7)


@pytest.mark.parametrize("pattern", [*DETERMINISTIC, *RANDOM], ids=str)
def test_measured_budget_is_that_of_the_masks_of_all_layers(pattern):
    masks = {n: torch.stack([pattern.dense_mask(n, layer=layer)[0] for layer in range(3)]) for n in (9, 20)}
    budget = Queries(Profile({(9, 9): 1, (20, 2): 1})).measured([pattern] * 3)
    keys = {n: mask.sum(-1).double().mean(0) for n, mask in masks.items()}
    assert budget.w_scored == pytest.approx(float(torch.cat([keys[9], keys[20][-2:]]).mean()))
    assert budget.w_eff == pytest.approx(float(torch.cat([keys[9], keys[20]]).mean()))


def test_closest_prefers_the_earlier_of_equals():
    queries = Queries(Profile({(10, 1): 1}))
    assert closest([Pattern.local(4), Pattern.local(6)], queries, 5, "w_scored") == Pattern.local(4)


def test_an_empty_profile_is_refused():
    with pytest.raises(ValueError, match="profile must hold at least one request"):
        Queries(Profile())


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        (Pattern.local(6), 6),
        (Pattern.local(4, sinks=2), 6),
        (Pattern.stochastic(6), 6),
        (Pattern.stochastic(3, shape="block"), 6),
        (Pattern.stochastic(3, shape="block", local=2, correction=0.5), 3),
        (Pattern.stochastic(3, scope="prefix", local=6, correction=0.5), 6),
        (Pattern.strided(2, 3, local=4, sinks=1), 5),
        (Pattern.bigbird(3, 1, sinks=1), 6),
        (Pattern.moba(3, 2), 6),
    ],
    ids=str,
)
def test_what_is_full_attention_on_short_texts_is_known(pattern, longest):
    assert [n for n in range(1, 20) if sees_everything(pattern, n)] == list(range(1, longest + 1))
    for n in range(1, longest + 1):
        q, k, v = torch.randn(3, 1, 1, n, 4, dtype=torch.float64)
        torch.testing.assert_close(attention(q, k, v, pattern), attention(q, k, v, Pattern.full()))


def test_candidates_far_beyond_the_budget_are_not_looked_at():
    def windows():
        for window in range(1, 1000):
            assert window < 100
            yield Pattern.local(window)

    queries = Queries(Profile({(2000, 1000): 1}))
    assert closest(windows(), queries, 32, "w_scored") == Pattern.local(32)
