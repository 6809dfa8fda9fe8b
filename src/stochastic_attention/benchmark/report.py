"""Measured rows as lines on a screen and as a figure, beside what was predicted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..plots import Curve, Panel, Point
from .workloads import METHODS

Predictions = Mapping[tuple[str, str, int, int, int], Mapping[str, Any]]

_LABELS = {"forward": "forward", "backward": "forward+backward", "decode": "decode"}


def by_case(rows: Sequence[Mapping[str, Any]], *, planned_ahead: bool) -> Predictions:
    """Rows of `sattn predict`, by method, direction, length, head dimension and batch.

    `planned_ahead` leaves planning out of them, except of steps of decoding, which plan nothing ahead.
    """
    found = {}
    for row in rows:
        if planned_ahead and row["direction"] != "decode":
            seconds = row["seconds"] - row["seconds_of_planning"]
            row = {**row, "seconds": seconds, "speedup": row["speedup_planned_ahead"]}
        found[_key(row, row["direction"])] = row
    return found


def speed_line(row: Mapping[str, Any], direction: str, predictions: Predictions) -> str:
    """One method's time and speedup; with a prediction also that, and the rates of the work that was counted for it."""
    line = (
        f"{_shape(row, direction)} {row['pattern']:<15} {row['seconds'] * 1e3:>9.2f} ms   full "
        f"{row['full_seconds'] * 1e3:>9.2f} ms   {row['speedup']:>6.2f}x of {row['limit']:.1f}x"
    )
    predicted = predictions.get(_key(row, direction))
    if predicted is None:
        return line
    counts, seconds = predicted["counts"], row["seconds"]
    return (
        f"{line}   predicted {predicted['speedup']:.2f}x   {counts['flops'] / seconds / 1e12:.0f} TFLOP/s "
        f"{counts['bytes_of_memory'] / seconds / 1e9:.0f} GB/s"
    )


def full_line(row: Mapping[str, Any]) -> str:
    """One kernel of full attention: its time, or why there is none."""
    found = row["reason"] if row["seconds"] is None else f"{row['seconds'] * 1e3:>9.2f} ms"
    return f"{_shape(row, row['direction'])} full, {row['kernel']:<9} {found}"


def memory_line(row: Mapping[str, Any]) -> str:
    """One method's peak memory."""
    direction = "backward" if row["backward"] else "forward"
    return f"{_shape(row, direction)} {row['pattern']:<15} {row['extra_bytes'] / 2**20:>9.1f} MiB above the inputs"


def case_line(outcome: Mapping[str, Any]) -> str:
    """Why a case has no rows."""
    return f"{_shape(outcome, outcome['direction'])} {outcome['reason']}"


def panels(results: Mapping[str, Any], predictions: Predictions) -> list[Panel]:
    """Speedup over full attention by length: a panel a direction and head dimension, predictions dotted."""
    rows = [(row, "backward" if row["backward"] else "forward") for row in results["speed"]]
    rows += [(row, "decode") for row in results["decode"]]
    return [
        Panel(
            title=f"{_LABELS[direction]}, head dimension {head_dim}",
            y_label="times faster than full attention",
            y_is_log=True,
            reference=1.0,
            reference_label="full attention",
            curves=_curves(
                [row for row, d in rows if (d, row["head_dim"]) == (direction, head_dim)], direction, predictions
            ),
        )
        for direction, head_dim in dict.fromkeys((d, row["head_dim"]) for row, d in rows)
    ]


def _curves(rows: Sequence[Mapping[str, Any]], direction: str, predictions: Predictions) -> list[Curve]:
    curves = []
    for name in dict.fromkeys(row["pattern"] for row in rows):
        own = sorted((row for row in rows if row["pattern"] == name), key=lambda row: row["length"])
        colour = METHODS.index(name)
        curves.append(Curve(name, colour, [Point(row["length"], row["speedup"], 0.0) for row in own]))
        known = [(row["length"], predictions.get(_key(row, direction))) for row in own]
        predicted = [Point(length, found["speedup"], 0.0) for length, found in known if found is not None]
        if predicted:
            curves.append(Curve(f"{name}, predicted", colour, predicted, is_closed_form=True))
    return curves


def _shape(row: Mapping[str, Any], direction: str) -> str:
    return f"{row['length']:>7} {_LABELS[direction]:<17} D={row['head_dim']:<4} B={row['batch']:<4}"


def _key(row: Mapping[str, Any], direction: str) -> tuple[str, str, int, int, int]:
    return row["pattern"], direction, row["length"], row["head_dim"], row["batch"]
