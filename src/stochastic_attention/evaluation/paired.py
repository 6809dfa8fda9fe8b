"""Differences between methods on the same rows, whose standard errors are much smaller than those of two accuracies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a task under one draw of a method at a budget, None for one without."""

    task: str
    method: str
    budget: int | None
    values: Sequence[float]


@dataclass(frozen=True)
class Difference:
    """`method` minus `other` at one budget.

    Attributes:
        value: mean over the tasks of the mean over a task's rows, each row a mean over the draws.
        stderr: its standard error over rows.
        tasks: those that both have.
    """

    method: str
    other: str
    budget: int
    value: float
    stderr: float
    tasks: list[str]


def paired_differences(rows: Sequence[ScoredRows]) -> list[Difference]:
    """Of every two methods at every budget; what has no budget is there at each. Tasks of one row are left out."""
    found = []
    for budget in sorted({scored.budget for scored in rows if scored.budget is not None}):
        there = [scored for scored in rows if scored.budget in (None, budget)]
        for other, method in combinations(dict.fromkeys(scored.method for scored in there), 2):
            differences = {
                task: [
                    a - b for a, b in zip(_mean_rows(there, task, method), _mean_rows(there, task, other), strict=True)
                ]
                for task in dict.fromkeys(scored.task for scored in there)
                if _mean_rows(there, task, method) and _mean_rows(there, task, other)
            }
            differences = {task: values for task, values in differences.items() if len(values) > 1}
            if differences:
                found.append(_difference(method, other, budget, differences))
    return found


def _mean_rows(rows: Sequence[ScoredRows], task: str, method: str) -> list[float]:
    """Each row of the task, a mean over draws; empty where there is none."""
    draws = [scored.values for scored in rows if (scored.task, scored.method) == (task, method)]
    return [statistics.fmean(values) for values in zip(*draws, strict=True)]


def _difference(method: str, other: str, budget: int, differences: dict[str, list[float]]) -> Difference:
    variances = [statistics.variance(values) / len(values) for values in differences.values()]
    return Difference(
        method,
        other,
        budget,
        value=statistics.fmean(statistics.fmean(values) for values in differences.values()),
        stderr=math.sqrt(sum(variances)) / len(variances),
        tasks=list(differences),
    )
