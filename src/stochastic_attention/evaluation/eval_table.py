"""An evaluation as a Markdown table: a line a task and metric."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..tables import markdown
from .evaluate import Result


def render(results: Sequence[Result]) -> str:
    """Means over draws, their spread, and the standard error over the rows of one draw."""
    shows_keys = any(result.w_scored is not None for result in results)
    header = ["task", "metric", "rows", "value", "± rows", "± draws"]
    lines = [header + ["w_scored (w_eff)"] * shows_keys]
    for task in dict.fromkeys(result.task for result in results):
        mine = [result for result in results if result.task == task]
        for metric, first in mine[0].metrics.items():
            values = [result.metrics[metric].value for result in mine]
            stderr = "" if first.stderr is None else _figure(first.stderr)
            spread = _figure(statistics.stdev(values)) if len(values) > 1 else ""
            line = [task, metric, str(first.n), _figure(statistics.fmean(values)), stderr, spread]
            lines.append(line + [_keys(mine)] * shows_keys)
    notes = [
        "± rows: standard error over the rows of the task, of the first draw.",
        f"± draws: standard deviation over {max(_draws(results))} draws of the random orders."
        if max(_draws(results)) > 1
        else "± draws: nothing was drawn more than once.",
    ]
    return markdown(lines) + "\n" + "".join(f"- {note}\n" for note in notes)


def _draws(results: Sequence[Result]) -> list[int]:
    return [sum(other.task == result.task for other in results) for result in results]


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _keys(results: Sequence[Result]) -> str:
    scored = statistics.fmean(result.w_scored or 0 for result in results)
    return f"{scored:.1f} ({statistics.fmean(result.w_eff or 0 for result in results):.1f})"
