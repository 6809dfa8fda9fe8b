"""An evaluation as Markdown tables: a line a method and budget with a column a task, and every metric by itself."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ..tables import markdown
from .budget import Match
from .evaluate import Result, headline


def render(results: Sequence[Result], *, match: Match) -> str:
    """Means over draws and their spread; under methods also what each does at each budget, side by side.

    Args:
        results: of one evaluation.
        match: the measured mean that the budget was fitted to.
    """
    metrics = _by_metric(results)
    return metrics if results[0].method is None else _by_method(results, match) + "\n" + metrics


def _by_method(results: Sequence[Result], match: Match) -> str:
    tasks = list(dict.fromkeys(result.task for result in results))
    first = {task: next(result for result in results if result.task == task) for task in tasks}
    header = ["method", "budget", *(f"{task}: {headline(first[task])}" for task in tasks), "mean", "w_eff", "w_scored"]
    rows = []
    for method, budget in dict.fromkeys((result.method, result.budget) for result in results):
        mine = [result for result in results if (result.method, result.budget) == (method, budget)]
        draws = list(dict.fromkeys(result.seed for result in mine))
        by_draw = [[result for result in mine if result.seed == draw] for draw in draws]
        cells = [_cell([_score(result) for result in mine if result.task == task]) for task in tasks]
        means = [
            _cell([statistics.fmean(read(result) for result in draw) for draw in by_draw])
            for read in (_score, lambda result: result.w_eff or 0, lambda result: result.w_scored or 0)
        ]
        rows.append([str(method), "-" if budget is None else str(budget), *cells, *means])
    notes = [
        f"Each method is set for each task so that {match} is nearest to the budget. w_eff: measured mean keys a "
        "query; w_scored: the same over the scored queries; both as means over the tasks. They fall short of the "
        "budget where texts are shorter than it: there a method is full attention.",
        f"±: standard deviation over {max(_draws(results))} draws of the random orders.",
    ]
    return markdown([header, *rows]) + _notes(notes)


def _score(result: Result) -> float:
    return result.metrics[headline(result)].value


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {_figure(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{_figure(statistics.fmean(values))}{spread}"


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
        f"± draws: standard deviation over {max(_draws(results))} draws of the random orders."
        if max(_draws(results)) > 1
        else "± draws: nothing was drawn more than once.",
    ]
    return markdown(lines) + _notes(notes)


def _notes(notes: Sequence[str]) -> str:
    return "\n" + "".join(f"- {note}\n" for note in notes)


def _draws(results: Sequence[Result]) -> list[int]:
    return list(Counter((result.task, result.method, result.budget) for result in results).values())


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _keys(results: Sequence[Result]) -> str:
    scored = statistics.fmean(result.w_scored or 0 for result in results)
    return f"{scored:.1f} ({statistics.fmean(result.w_eff or 0 for result in results):.1f})"
