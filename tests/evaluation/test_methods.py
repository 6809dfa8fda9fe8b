import pytest

from stochastic_attention import Pattern
from stochastic_attention.evaluation.budget import Queries
from stochastic_attention.evaluation.methods import METHODS, check_methods
from stochastic_attention.evaluation.requests import Profile

PROFILES = {
    "whole text": Profile({(200, 200): 1}),
    "last tokens": Profile({(120, 3): 2, (150, 5): 1, (163, 1): 1, (97, 8): 1}),
}
FITTED = [name for name in METHODS if name != "full"]


@pytest.mark.parametrize("match", ["w_scored", "w_eff"])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("method", FITTED)
def test_fit_is_the_nearest_of_all_candidates(method, profile, match):
    queries = Queries(profile)
    miss = abs(getattr(queries.expected(METHODS[method].fit(queries, 32, match)), match) - 32)
    candidates = METHODS[method].candidates(queries.longest)
    every = [abs(getattr(queries.expected(pattern), match) - 32) for pattern in candidates]
    assert miss == min(every)


# A prefix of L = window * 2**m positions allows few budgets where few positions are scored.
@pytest.mark.parametrize(
    ("method", "allowance"),
    [(name, 0.3 if name in ("sa-prefix", "moba-k2") else 0.05) for name in FITTED],
)
def test_measured_budget_of_the_fit_meets_the_target(method, allowance):
    queries = Queries(PROFILES["last tokens"])
    pattern = METHODS[method].fit(queries, 32, "w_scored").seeded(7)
    assert queries.measured([pattern] * 60).w_scored == pytest.approx(32, rel=allowance)


def test_moba_prefers_block_size_16_and_moba_k2_keeps_two_blocks():
    queries = Queries(Profile({(160, 1): 1}))  # the query stands at the end of a block of 16
    assert METHODS["moba"].fit(queries, 48, "w_scored") == Pattern.moba(16, 3)
    assert METHODS["moba-k2"].fit(queries, 48, "w_scored").top_k == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_changes_random_methods_alone(method):
    queries = Queries(PROFILES["whole text"])
    pattern = METHODS[method].fit(queries, 32, "w_eff")
    assert pattern.is_random == METHODS[method].is_random
    assert (pattern.seeded(5) != pattern) == METHODS[method].is_random


def test_unknown_methods_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"methods must be among full, swa, .*got nonsense"):
        check_methods(["swa", "nonsense"])
