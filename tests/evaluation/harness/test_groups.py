"""Groups of tasks: members, shares of a limit, and the mean over all rows."""

import math
import statistics

import pytest

from stochastic_attention.evaluation.harness.groups import GROUPS, expand, pooled, split_limit
from stochastic_attention.records import Estimate


def test_a_group_stands_for_its_members():
    assert len(set(GROUPS["mmlu"])) == 57
    names = list(expand(["piqa", "mmlu", "boolq"]))
    assert names == ["piqa", *GROUPS["mmlu"], "boolq"]


@pytest.mark.parametrize(
    ("limit", "sizes", "expected"),
    [
        (6, {"a": 9, "b": 9, "c": 9}, {"a": 2, "b": 2, "c": 2}),
        (7, {"a": 9, "b": 9, "c": 9}, {"a": 2, "b": 2, "c": 3}),
        (11, {"a": 9, "b": 1, "c": 9}, {"a": 5, "b": 1, "c": 5}),  # what b has not, the others give
        (2, {"a": 9, "b": 9, "c": 9}, {"b": 1, "c": 1}),
        (100, {"a": 9, "b": 1}, {"a": 9, "b": 1}),
    ],
)
def test_a_limit_is_shared_evenly(limit, sizes, expected):
    shares = split_limit(limit, sizes)
    assert shares == expected
    assert list(shares) == [name for name in sizes if name in shares]


def of(rows):
    stderr = statistics.stdev(rows) / math.sqrt(len(rows)) if len(rows) > 1 else None
    return Estimate(statistics.fmean(rows), stderr, len(rows))


@pytest.mark.parametrize("parts", [[[0, 1, 1], [0, 0, 1, 0, 1]], [[1], [0, 1], [0]], [[1], [1]], [[0.5]]])
def test_the_mean_over_parts_is_that_of_all_their_rows(parts):
    found, expected = pooled([of(rows) for rows in parts]), of([row for rows in parts for row in rows])
    assert (found.value, found.n) == (pytest.approx(expected.value), expected.n)
    assert found.stderr == (None if expected.stderr is None else pytest.approx(expected.stderr))


def test_an_error_that_is_not_known_is_not_made_up():
    assert pooled([Estimate(0.5, None, 4), of([0, 1])]) == Estimate(0.5, None, 6)
