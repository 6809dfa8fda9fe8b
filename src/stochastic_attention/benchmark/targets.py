"""What is wanted of the op on an H200 in bfloat16, and how measurements and predictions stand to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..tables import markdown

# Times faster than the fastest full attention, by tokens: of the better of SA's two shapes, either direction.
SPEEDUPS = {2048: 1.8, 8192: 8.0, 32768: 30.0}
GATED_OVER_SWA = 2.2  # of time, at most
MEMORY_OVER_FULL = 1.1  # peak bytes above the inputs, at most

_SHAPES = ("sliding", "block")
_Cell = tuple[str, int, int]  # direction, length, head dimension


def against_targets(results: Mapping[str, Any], predictions: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table of each target, what was measured (`results` of `sattn bench`) and what was predicted of it."""
    measured = _by_cell(results["speed"], lambda row: "backward" if row["backward"] else "forward")
    predicted = _by_cell(predictions, lambda row: row["direction"])
    memory = _by_cell(results["memory"], lambda row: "backward" if row["backward"] else "forward")
    rows: list[tuple[str, ...]] = [("target, H200", "n", "D", "wanted", "measured", "predicted", "")]
    for cell, methods in measured.items():
        direction, length, head_dim = cell
        shape = (f"{length:,}", str(head_dim))
        of_model = predicted.get(cell, {})
        if length in SPEEDUPS:
            got, expected = _best(methods), _best(of_model)
            rows.append(_row(f"speedup, {direction}", *shape, SPEEDUPS[length], got, expected, at_least=True))
        rows.append(
            _row(f"gated / SWA, {direction}", *shape, GATED_OVER_SWA, *map(_gated, (methods, of_model)), at_least=False)
        )
        peaks = {name: row["extra_bytes"] for name, row in memory.get(cell, {}).items()}
        if "full" in peaks and any(name in peaks for name in _SHAPES):
            ratio = min(peaks[name] for name in _SHAPES if name in peaks) / peaks["full"]
            rows.append(_row(f"memory / full, {direction}", *shape, MEMORY_OVER_FULL, ratio, None, at_least=False))
    return markdown([row for row in rows if row[4] != "-"])


def _by_cell(
    rows: Iterable[Mapping[str, Any]], direction: Callable[[Mapping[str, Any]], str]
) -> dict[_Cell, dict[str, Mapping[str, Any]]]:
    cells: dict[_Cell, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((direction(row), row["length"], row["head_dim"]), {})[row["pattern"]] = row
    return cells


def _best(methods: Mapping[str, Mapping[str, Any]]) -> float | None:
    return max((methods[name]["speedup"] for name in _SHAPES if name in methods), default=None)


def _gated(methods: Mapping[str, Mapping[str, Any]]) -> float | None:
    both = "gated" in methods and "swa" in methods
    return methods["gated"]["seconds"] / methods["swa"]["seconds"] if both else None


def _row(
    what: str, length: str, head_dim: str, wanted: float, got: float | None, expected: float | None, *, at_least: bool
) -> tuple[str, ...]:
    met = got is not None and (got >= wanted if at_least else got <= wanted)
    figures = (f"{'>=' if at_least else '<='} {wanted:g}", *("-" if x is None else f"{x:.2f}" for x in (got, expected)))
    return (what, length, head_dim, *figures, "met" if met else "missed")
