"""The comparison as a Markdown table, aligned so that it reads on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..tables import markdown
from .budget import Match
from .methods import REFERENCE
from .results import CellResult, PrefillResult, Summary, summarise
from .tasks import TASKS

# A measured budget further than this from the one asked for is marked.
TOLERANCE = 0.05


@dataclass(frozen=True)
class _Line:
    method: str
    budget: int | None


def render(cells: Sequence[CellResult], prefill: Sequence[PrefillResult], *, match: Match, length: int) -> str:
    """A line a method and budget: for each task the measured keys and the quality, then the prefill time.

    Args:
        cells, prefill: of one comparison.
        match: the measured mean that the budget was fitted to; the other one stands in brackets.
        length: tokens of the timed prompt.
    """
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    lines = list(dict.fromkeys(_Line(cell.method, cell.budget) for cell in cells))
    other = "w_eff" if match == "w_scored" else "w_scored"
    header = ["method", "budget"]
    for task in tasks:
        arrow = "↑" if TASKS[task].higher_is_better else "↓"
        header += [f"{task}: {match} ({other})", f"{task}: {TASKS[task].headline} {arrow}"]
    header += ["prefill ms", "full / it"]
    times = {_Line(result.method, result.budget): result for result in prefill}
    rows = []
    for line in lines:
        row = [line.method, "-" if line.budget is None else str(line.budget)]
        for task in tasks:
            mine = [cell for cell in cells if (cell.task, cell.method, cell.budget) == (task, line.method, line.budget)]
            summary = summarise(mine, TASKS[task].headline)
            row += [_keys(summary, line.budget, match), _quality(summary)]
        rows.append(row + _time(times[line], times[_Line(REFERENCE, None)]))
    return markdown([header, *rows]) + _notes(cells, tasks, match, length)


def _keys(summary: Summary, budget: int | None, match: Match) -> str:
    met, other = (summary.w_scored, summary.w_eff) if match == "w_scored" else (summary.w_eff, summary.w_scored)
    off = summary.value is not None and budget is not None and abs(met - budget) > TOLERANCE * budget
    return f"{met:.1f}{'*' if off else ''} ({other:.1f})"


def _quality(summary: Summary) -> str:
    if summary.value is None:
        return "saturated"
    digits = 3 if summary.value < 10 else 2
    return f"{summary.value:.{digits}f}" + ("" if summary.spread is None else f" ± {summary.spread:.{digits}f}")


def _time(result: PrefillResult, full: PrefillResult) -> list[str]:
    if result.median is None or full.median is None:
        return ["saturated", ""]
    return [f"{result.median:.0f}", f"{full.median / result.median:.2f}x"]


def _notes(cells: Sequence[CellResult], tasks: Sequence[str], match: Match, length: int) -> str:
    notes = []
    for task in tasks:
        full = next(cell for cell in cells if cell.task == task and cell.method == REFERENCE)
        estimate = full.metrics[TASKS[task].headline]
        error = "" if estimate.stderr is None else f", standard error over them {estimate.stderr:.3g} (full attention)"
        notes.append(f"{task}: {TASKS[task].headline} of {estimate.n} item{'s' if estimate.n > 1 else ''}{error}.")
    notes += [
        "w_eff: measured mean keys a query; w_scored: the same over the scored queries. "
        f"Each method is set so that {match} meets the budget; * marks a miss of more than {TOLERANCE:.0%}.",
        "±: standard deviation over seeds. saturated: full attention itself has no more keys than the budget.",
        f"prefill: median forward pass over {length} tokens, batch 1, each method at mean keys a query = budget there.",
    ]
    return "\n" + "\n".join(f"- {note}" for note in notes) + "\n"
