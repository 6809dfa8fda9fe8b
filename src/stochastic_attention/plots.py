"""Every figure. Drawn without a display and without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MARKERS = "osD^v<>Ph*"


@dataclass(frozen=True)
class Point:
    """A measurement at `x`, with the half length of its error bar."""

    x: float
    y: float
    error: float


@dataclass(frozen=True)
class Curve:
    """Points of one method. `colour` is a place among colours and markers, so that a method keeps its own everywhere.

    The ten colours come again with another marker.

    A closed form is drawn as a thin dotted line without markers, to stand behind what was measured.
    """

    label: str
    colour: int
    points: Sequence[Point]
    is_closed_form: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes, and a level to hold them against (None: there is none).

    `bands` draws errors as bands around the curves in place of bars.
    """

    title: str
    y_label: str
    y_is_log: bool
    reference: float | None
    reference_label: str
    curves: Sequence[Curve]
    bands: bool = False


def plot_panels(panels: Sequence[Panel], x_label: str, path: Path) -> None:
    """Draw panels side by side under one legend, x on a log scale. Writes a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        _draw(axis, panel)
        axis.set_xlabel(x_label)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    # A panel is as wide as some 46 letters; an entry is its label and a line of about 6.
    fitting = 46 * len(panels) // (6 + max(map(len, handles), default=0))
    columns = max(1, min(len(handles), 8, fitting))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.reference is not None:
        axes.axhline(panel.reference, color="black", linestyle="--", label=panel.reference_label)
    for curve in panel.curves:
        x = [point.x for point in curve.points]
        if panel.bands:
            low, high = ([point.y + sign * point.error for point in curve.points] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=f"C{curve.colour}", alpha=0.2, linewidth=0)
        axes.errorbar(
            x,
            [point.y for point in curve.points],
            yerr=None if panel.bands else [point.error for point in curve.points],
            color=f"C{curve.colour}",
            marker="" if curve.is_closed_form else _MARKERS[curve.colour // 10 % len(_MARKERS)],
            linestyle=":" if curve.is_closed_form else "-",
            capsize=3,
            label=curve.label,
        )
    axes.set_xscale("log", base=2)
    places = [point.x for curve in panel.curves for point in curve.points]
    if places:  # a lone budget would else be blown up to the full width
        axes.set_xlim(min(places) / 1.5, max(places) * 1.5)
    if panel.y_is_log:
        axes.set_yscale("log")
    axes.set_title(panel.title)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Scatter:
    """Labelled points over one pair of logarithmic axes; `at_one` marks the value 1 of both."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[str, float, float]]
    at_one: bool = False


def plot_scatters(scatters: Sequence[Scatter], path: Path) -> None:
    """Draw scatters side by side; a label keeps its colour and marker in all of them. Writes a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(5.2 * len(scatters), 4.8), layout="constrained")
    labels = list(dict.fromkeys(label for scatter in scatters for label, _, _ in scatter.points))
    for scatter, axes in zip(scatters, figure.subplots(1, len(scatters), squeeze=False)[0], strict=True):
        for label, x, y in scatter.points:
            place = labels.index(label)
            axes.loglog(x, y, _MARKERS[place % len(_MARKERS)], color=f"C{place % 10}", label=label)
        if scatter.at_one:
            axes.axhline(1, color="black", linestyle="--")
            axes.axvline(1, color="black", linestyle="--")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(scatter.title)
        axes.set_xlabel(scatter.x_label)
        axes.set_ylabel(scatter.y_label)
        axes.grid(alpha=0.3)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4))
    figure.savefig(path, dpi=150)


def plot_training(
    losses: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]], path: Path
) -> None:
    """Draw the loss of training steps and of validations against the tokens seen. Writes a PNG.

    Both are entries with `tokens` and `loss`; the steps' are drawn thin, and thick as running means of an exponential
    window of a fiftieth of them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([e["tokens"] for e in losses], [e["loss"] for e in losses], color="C0", alpha=0.3, linewidth=0.8)
    means, share = [], 1 / max(1, len(losses) // 50)
    for entry in losses:
        means.append(entry["loss"] if not means else means[-1] + share * (entry["loss"] - means[-1]))
    axes.plot([e["tokens"] for e in losses], means, color="C0", label="training")
    if validations:
        points = [e["tokens"] for e in validations], [e["loss"] for e in validations]
        axes.plot(*points, "o-", color="C1", markersize=4, label="validation")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss a token, nats")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
