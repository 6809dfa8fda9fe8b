"""An evaluation as Markdown tables: a line a method and budget with a column a task, and every metric by itself."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from ...tables import markdown
from ..budget import Match
from ..paired import Difference
from ..ranking import Cell, common_targets, rank
from .evaluate import Result, headline, is_accuracy

# What every method is compared with on the same rows, where it took part.
OTHERS = ("full", "swa+sinks")


def render(results: Sequence[Result], differences: Sequence[Difference], *, match: Match) -> str:
    """Means over draws and their spread; under methods also what each does at each budget, side by side.

    Args:
        results, differences: of one evaluation.
        match: the measured mean that the budget was fitted to.
    """
    metrics = _by_metric(results)
    if results[0].method is None:
        return metrics
    parts = [_by_method(results, differences, match), _at_equal_keys(accuracies(results)), metrics]
    return "\n".join(part for part in parts if part)


def accuracies(results: Sequence[Result]) -> list[Cell]:
    """The cells of a sweep, empty where its tasks are measured by something else."""
    if not all(is_accuracy(headline(result)) for result in results):
        return []
    return [
        Cell(
            method=str(result.method),
            budget=result.budget,
            seed=result.seed,
            task=result.task,
            w_eff=result.w_eff or 0,
            w_scored=result.w_scored or 0,
            value=_score(result),
        )
        for result in results
    ]


def _at_equal_keys(cells: Sequence[Cell]) -> str:
    """How the methods rank by each measure of keys; empty where no number of keys lies between all measured ones."""
    rows = [["equal", "keys", "mean accuracy over the tasks, the best method first"]]
    for by in get_args(Match):
        for ranking in rank(cells, by, common_targets(cells, by)):
            told = [f"{one.method} {_cell_of(one.mean, one.spread)}" for one in ranking.standings]
            rows.append([by, str(ranking.keys), ", ".join(told)])
    note = "Interpolated between budgets, linearly in the logarithm of the keys; ±: standard deviation over draws."
    return markdown(rows) + _notes([note]) if len(rows) > 1 else ""


def _by_method(results: Sequence[Result], differences: Sequence[Difference], match: Match) -> str:
    tasks = list(dict.fromkeys(result.task for result in results))
    headlines = {result.task: headline(result) for result in results}
    alike = all(map(is_accuracy, headlines.values()))  # else a mean over tasks means nothing
    others = [other for other in OTHERS if alike and any(difference.other == other for difference in differences)]
    both_ways = [*differences, *(replace(d, method=d.other, other=d.method, value=-d.value) for d in differences)]
    paired = {(d.method, d.budget, d.other): f"{d.value:+.3f} ± {d.stderr:.3f}" for d in both_ways}
    header = ["method", "budget", *(f"{task}: {headlines[task]}" for task in tasks)]
    rows = [[*header, *["mean"] * alike, *(f"- {other}" for other in others), "w_scored (w_eff)"]]
    for method, budget in dict.fromkeys((result.method, result.budget) for result in results):
        mine = [result for result in results if (result.method, result.budget) == (method, budget)]
        by_draw = [[result for result in mine if result.seed == draw] for draw in dict.fromkeys(r.seed for r in mine)]
        row = [str(method), "-" if budget is None else str(budget)]
        row += [_cell([_score(result) for result in mine if result.task == task]) for task in tasks]
        row += [_cell([statistics.fmean(map(_score, draw)) for draw in by_draw])] * alike
        row += [paired.get((str(method), budget or 0, other), "") for other in others]
        rows.append([*row, _keys(mine)])
    notes = [
        f"Each method is set for each task so that {match} is nearest to the budget. w_eff: measured mean keys a "
        "query; w_scored: the same over the scored queries; both as means over the tasks. They fall short of the "
        "budget where texts are shorter than it: there a method is full attention.",
        f"±: {_over_draws(results)}; of a difference, its standard error over rows, the same rows for both.",
    ]
    return markdown(rows) + _notes(notes)


def _score(result: Result) -> float:
    return result.metrics[headline(result)].value


def _cell(values: Sequence[float]) -> str:
    return _cell_of(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _cell_of(mean: float | None, spread: float | None) -> str:
    told = "" if mean is None else _short(mean)
    return told if spread is None else f"{told} ± {_short(spread)}"


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def _by_metric(results: Sequence[Result]) -> str:
    shows_methods = any(result.method is not None for result in results)
    header = ["task", *(["method", "budget"] * shows_methods), "metric", "rows", "value", "± rows", "± draws"]
    lines = [header + ["w_scored (w_eff)"] * shows_methods]
    for task, method, budget in dict.fromkeys((result.task, result.method, result.budget) for result in results):
        mine = [result for result in results if (result.task, result.method, result.budget) == (task, method, budget)]
        names = [str(method), "-" if budget is None else str(budget)] * shows_methods
        for metric, first in mine[0].metrics.items():
            values = [result.metrics[metric].value for result in mine]
            stderr = "" if first.stderr is None else _figure(first.stderr)
            spread = _figure(statistics.stdev(values)) if len(values) > 1 else ""
            line = [task, *names, metric, str(first.n), _figure(statistics.fmean(values)), stderr, spread]
            lines.append(line + [_keys(mine)] * shows_methods)
    notes = [
        "± rows: standard error over the rows of the task, of the first draw.",
        f"± draws: {_over_draws(results)}.",
    ]
    return markdown(lines) + _notes(notes)


def _notes(notes: Sequence[str]) -> str:
    return "\n" + "".join(f"- {note}\n" for note in notes)


def _over_draws(results: Sequence[Result]) -> str:
    draws = max(Counter((result.task, result.method, result.budget) for result in results).values())
    return (
        f"standard deviation over {draws} draws of the random orders"
        if draws > 1
        else "nothing was drawn more than once"
    )


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _keys(results: Sequence[Result]) -> str:
    scored = statistics.fmean(result.w_scored or 0 for result in results)
    return f"{scored:.1f} ({statistics.fmean(result.w_eff or 0 for result in results):.1f})"
