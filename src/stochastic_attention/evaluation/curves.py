"""The comparison as curves: quality against measured keys a scored query, a panel a task."""

from __future__ import annotations

from collections.abc import Sequence

from ..plots import Curve, Panel, Point
from .methods import METHODS, PRESET, REFERENCE
from .results import CellResult, summarise
from .tasks import TASKS

X_LABEL = "keys a scored query (measured)"


def panels(cells: Sequence[CellResult]) -> list[Panel]:
    """A panel a task, a curve a method; full attention is the level they are held against."""
    return [
        _panel(task, [cell for cell in cells if cell.task == task])
        for task in dict.fromkeys(cell.task for cell in cells)
    ]


def _panel(task: str, cells: Sequence[CellResult]) -> Panel:
    metric = TASKS[task].headline
    (full,) = (cell for cell in cells if cell.method == REFERENCE)
    methods = [name for name in dict.fromkeys(cell.method for cell in cells) if name != REFERENCE]
    return Panel(
        title=task,
        y_label=metric,
        y_is_log=not TASKS[task].higher_is_better,
        reference=full.metrics[metric].value,
        reference_label=REFERENCE,
        curves=[_curve(name, metric, [cell for cell in cells if cell.method == name]) for name in methods],
    )


def _curve(method: str, metric: str, cells: Sequence[CellResult]) -> Curve:
    points = []
    for budget in dict.fromkeys(cell.budget for cell in cells):
        summary = summarise([cell for cell in cells if cell.budget == budget], metric)
        if summary.value is not None:
            points.append(Point(summary.w_scored, summary.value, summary.spread or 0.0))
    known = [*METHODS, method]  # presets share what comes after the methods
    return Curve(method.removeprefix(PRESET), known.index(method) - 1, sorted(points, key=lambda point: point.x))
