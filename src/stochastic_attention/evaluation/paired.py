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
    means = _mean_rows(rows)
    for budget in sorted({scored.budget for scored in rows if scored.budget is not None}):
        here = {(task, method): values for (task, method, at), values in means.items() if at in (None, budget)}
        for other, method in combinations(dict.fromkeys(method for _, method in here), 2):
            differences = {
                task: [a - b for a, b in zip(here[task, method], here[task, other], strict=True)]
                for task in dict.fromkeys(task for task, _ in here)
                if (task, method) in here and (task, other) in here
            }
            differences = {task: values for task, values in differences.items() if len(values) > 1}
            if differences:
                found.append(_difference(method, other, budget, differences))
    return found


def _mean_rows(rows: Sequence[ScoredRows]) -> dict[tuple[str, str, int | None], list[float]]:
    """Each row of a task under a method at a budget, a mean over draws."""
    draws: dict[tuple[str, str, int | None], list[Sequence[float]]] = {}
    for scored in rows:
        draws.setdefault((scored.task, scored.method, scored.budget), []).append(scored.values)
    return {key: [statistics.fmean(values) for values in zip(*found, strict=True)] for key, found in draws.items()}


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
