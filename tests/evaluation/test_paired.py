"""Paired differences of methods."""

import math

import pytest

from stochastic_attention.evaluation.paired import ScoredRows, paired_differences


def test_rows_are_paired_and_tasks_weigh_alike():
    rows = [
        ScoredRows("a", "full", None, [1, 1, 0, 1]),
        ScoredRows("b", "full", None, [1, 1]),
        ScoredRows("a", "swa", 8, [1, 0, 0, 0]),
        ScoredRows("b", "swa", 8, [0, 1]),
        ScoredRows("a", "sa", 8, [1, 1, 0, 0]),
        ScoredRows("a", "sa", 8, [0, 1, 0, 0]),
        ScoredRows("a", "swa", 16, [1, 1, 0, 1]),
    ]
    found = {(d.method, d.other, d.budget): d for d in paired_differences(rows)}
    assert set(found) == {("swa", "full", 8), ("sa", "full", 8), ("sa", "swa", 8), ("swa", "full", 16)}
    swa = found["swa", "full", 8]
    assert swa.value == pytest.approx((-0.5 - 0.5) / 2)
    assert swa.stderr == pytest.approx(math.sqrt((1 / 3) / 4 + 0.5 / 2) / 2)
    assert swa.tasks == ["a", "b"]
    sa = found["sa", "full", 8]  # rows 1/2, 1, 0, 0 as means over draws
    assert (sa.value, sa.tasks) == (pytest.approx(-1.5 / 4), ["a"])
    assert sa.stderr == pytest.approx(math.sqrt(((0.125**2 * 1 + 0.375**2 * 2 + 0.625**2) / 3) / 4))
    assert found["swa", "full", 16].value == 0


def test_what_cannot_be_paired_is_left_out():
    alone = [ScoredRows("a", "full", None, [1]), ScoredRows("a", "swa", 8, [0]), ScoredRows("b", "swa", 8, [0, 1])]
    assert paired_differences(alone) == []
    with pytest.raises(ValueError, match="zip"):
        paired_differences([ScoredRows("a", "full", None, [1, 0]), ScoredRows("a", "swa", 8, [0])])
