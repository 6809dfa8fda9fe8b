"""Methods ranked at equal measured keys a query, once by each measure of keys: the two need not agree.

A method that gives late queries more keys than early ones has more keys at the scored queries than over all of them, so
that it stands further right by w_scored than by w_eff, and every other method gains on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .budget import Match


@dataclass(frozen=True)
class Cell:
    """What a task gave under one method at one budget and seed.

    Attributes:
        budget: keys a query asked for; None for full attention, which is not ranked.
        seed: None for a method without chance.
        w_eff, w_scored: measured mean keys over all queries, and over the scored ones.
        value: higher is better.
    """

    method: str
    budget: int | None
    seed: int | None
    task: str
    w_eff: float
    w_scored: float
    value: float


@dataclass(frozen=True)
class Run:
    """A method at one budget and seed: means over the tasks."""

    method: str
    budget: int | None
    seed: int | None
    w_eff: float
    w_scored: float
    value: float

    def keys(self, by: Match) -> float:
        """Measured mean keys a query."""
        return self.w_eff if by == "w_eff" else self.w_scored


@dataclass(frozen=True)
class Standing:
    """A method at a number of keys.

    Attributes:
        mean: over its seeds; None where some seed was not measured with fewer keys and with more.
        spread: sample standard deviation over seeds, None with fewer than two.
    """

    method: str
    mean: float | None
    spread: float | None


@dataclass(frozen=True)
class Ranking:
    """The methods at `keys` keys a query, measured as `by` says; the best first, those without a mean last."""

    by: Match
    keys: float
    standings: list[Standing]


def over_tasks(cells: Iterable[Cell]) -> list[Run]:
    """Means over the tasks, of each method, budget and seed in the order of the cells.

    Raises:
        ValueError: some run lacks a task that another has, or has it twice: their means would not compare.
    """
    runs: dict[tuple[str, int | None, int | None], list[Cell]] = {}
    for cell in cells:
        runs.setdefault((cell.method, cell.budget, cell.seed), []).append(cell)
    tasks = sorted({cell.task for mine in runs.values() for cell in mine})
    for (method, budget, seed), mine in runs.items():
        if sorted(cell.task for cell in mine) != tasks:
            raise ValueError(
                f"cells must hold every task once for each method, budget and seed: {', '.join(tasks)}; "
                f"got {', '.join(cell.task for cell in mine)} for {method}, {budget}, {seed}"
            )
    return [
        Run(
            *key,
            w_eff=statistics.fmean(cell.w_eff for cell in mine),
            w_scored=statistics.fmean(cell.w_scored for cell in mine),
            value=statistics.fmean(cell.value for cell in mine),
        )
        for key, mine in runs.items()
    ]


def at_equal_keys(points: Iterable[tuple[float, float]], keys: float) -> float | None:
    """The score at `keys` keys, linear in log(keys) between the nearest measured points.

    Args:
        points: pairs of keys, positive, and score, in any order. Scores at the same keys are averaged.
        keys: positive.

    Returns:
        None where no point has as few keys, or none as many: nothing is extrapolated.
    """
    scores: dict[float, list[float]] = {}
    for at, score in points:
        scores.setdefault(at, []).append(score)
    wrong = [at for at in (keys, *scores) if not 0 < at < math.inf]
    if wrong:
        raise ValueError(f"keys must be positive and finite, got {wrong[0]}")
    means = {at: statistics.fmean(scores[at]) for at in sorted(scores)}
    if keys in means:
        return means[keys]
    for low, high in pairwise(means):
        if low < keys < high:
            share = math.log(keys / low) / math.log(high / low)
            return means[low] + share * (means[high] - means[low])
    return None


def rank(cells: Iterable[Cell], by: Match, targets: Sequence[float]) -> list[Ranking]:
    """A ranking at each of the `targets`, numbers of keys as `by` counts them; full attention is left out.

    Every seed of a method is interpolated by itself (`at_equal_keys`) between its budgets.
    """
    runs = [run for run in over_tasks(cells) if run.budget is not None]
    return [Ranking(by, keys, sorted(_standings(runs, by, keys), key=_place)) for keys in targets]


def common_targets(cells: Iterable[Cell], by: Match, count: int = 3) -> list[int]:
    """At most `count` numbers of keys at which all methods were measured, from the fewest on, even in log(keys).

    The most keys that all have are left out: there a sweep ends, often at full attention.
    """
    runs = [run for run in over_tasks(cells) if run.budget is not None]
    measured: dict[tuple[str, int | None], list[float]] = {}
    for run in runs:
        measured.setdefault((run.method, run.seed), []).append(run.keys(by))
    low = math.ceil(max((min(keys) for keys in measured.values()), default=1))
    high = min((max(keys) for keys in measured.values()), default=0)
    spaced = [math.ceil(low * (high / low) ** (place / count)) for place in range(count)] if high > low else []
    return list(dict.fromkeys(keys for keys in spaced if keys < high))


def _standings(runs: Sequence[Run], by: Match, keys: float) -> list[Standing]:
    standings = []
    for method in dict.fromkeys(run.method for run in runs):
        seeds: dict[int | None, list[tuple[float, float]]] = {}
        for run in runs:
            if run.method == method:
                seeds.setdefault(run.seed, []).append((run.keys(by), run.value))
        found = [at_equal_keys(points, keys) for points in seeds.values()]
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            standings.append(Standing(method, None, None))
        else:
            spread = statistics.stdev(values) if len(values) > 1 else None
            standings.append(Standing(method, statistics.fmean(values), spread))
    return standings


def _place(standing: Standing) -> float:
    return math.inf if standing.mean is None else -standing.mean
