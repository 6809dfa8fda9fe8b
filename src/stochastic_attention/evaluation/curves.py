"""Comparisons as curves: quality against measured keys a query."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import get_args

from ..plots import Curve, Panel, Point
from .budget import Match
from .methods import METHODS, PRESET, REFERENCE
from .ranking import Cell, Run, over_tasks
from .results import CellResult, summarise
from .tasks import TASKS

X_LABEL = "keys a scored query (measured)"
SWEEP_X_LABEL = "keys a query (measured, mean over the tasks)"


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
    return _named(method, points)


def sweep_panels(cells: Sequence[Cell], y_label: str) -> list[Panel]:
    """The mean over the tasks against w_scored, and against w_eff: a curve a method, its spread over seeds as a band.

    Args:
        cells: a sweep over budgets, the same tasks in each run; full attention, if among them, is the level that the
            curves are held against.
        y_label: what the values of the cells are.
    """
    runs = over_tasks(cells)
    full = [run.value for run in runs if run.budget is None]
    methods = list(dict.fromkeys(run.method for run in runs if run.budget is not None))
    return [
        Panel(
            title=f"by {by}",
            y_label=y_label,
            y_is_log=False,
            reference=full[0] if full else None,
            reference_label=REFERENCE,
            curves=[_sweep_curve(name, [run for run in runs if run.method == name], by) for name in methods],
            bands=True,
        )
        for by in get_args(Match)
    ]


def _sweep_curve(method: str, runs: Sequence[Run], by: Match) -> Curve:
    points = []
    for budget in dict.fromkeys(run.budget for run in runs):
        mine = [run for run in runs if run.budget == budget]
        values = [run.value for run in mine]
        error = statistics.stdev(values) if len(values) > 1 else 0.0
        points.append(Point(statistics.fmean(run.keys(by) for run in mine), statistics.fmean(values), error))
    return _named(method, points)


def _named(method: str, points: Sequence[Point]) -> Curve:
    """A method's curve in its colour; presets share what comes after the methods."""
    known = [*METHODS, method]
    return Curve(method.removeprefix(PRESET), known.index(method) - 1, sorted(points, key=lambda point: point.x))
