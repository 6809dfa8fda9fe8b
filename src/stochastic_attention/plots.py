"""Every figure. Drawn without a display and without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .evaluation.results import CellResult


def plot_comparison(cells: Sequence[CellResult], path: Path) -> None:
    """Quality against measured w_scored, a panel a task, a line a method; full attention dashed. Writes a PNG."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell.task for cell in cells))
    figure = Figure(figsize=(4.6 * len(tasks), 4.2), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        _draw_task(axes, task, [cell for cell in cells if cell.task == task])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8))
    figure.savefig(path, dpi=150)


def _draw_task(axes: Axes, task: str, cells: Sequence[CellResult]) -> None:
    from .evaluation.methods import METHODS, REFERENCE
    from .evaluation.results import summarise
    from .evaluation.tasks import TASKS

    metric = TASKS[task].headline
    for index, method in enumerate(METHODS):
        mine = [cell for cell in cells if cell.method == method]
        budgets = list(dict.fromkeys(cell.budget for cell in mine))
        points = [summarise([cell for cell in mine if cell.budget == budget], metric) for budget in budgets]
        points = sorted((point for point in points if point.value is not None), key=lambda point: point.w_scored)
        # A colour goes with a method, whichever methods this comparison has.
        colour = "black" if method == REFERENCE else f"C{index - 1}"
        if method == REFERENCE and points:
            axes.axhline(points[0].value or 0.0, color=colour, linestyle="--", label=method)
        elif mine:
            axes.errorbar(
                [point.w_scored for point in points],
                [point.value for point in points],  # type: ignore[arg-type]
                yerr=[point.spread or 0.0 for point in points],
                color=colour,
                marker="o",
                capsize=3,
                label=method,
            )
    axes.set_xscale("log", base=2)
    if not TASKS[task].higher_is_better:
        axes.set_yscale("log")
    axes.set_title(task)
    axes.set_xlabel("keys a scored query (measured)")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
