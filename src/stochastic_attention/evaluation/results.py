"""What a comparison yields, a cell at a time, and how cells are summed up over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..records import Estimate


@dataclass(frozen=True)
class CellResult:
    """One task under one method at one budget and seed.

    Attributes:
        budget: keys a query asked for; None for full attention.
        seed: None for a method without chance.
        pattern: what ran, in words.
        saturated: full attention itself has no more keys than the budget, so the method would be full attention;
            nothing ran, and the figures of full attention hold.
        w_eff, w_scored: measured mean keys over all queries, and over the scored ones.
        metrics: by name; empty where saturated.
        seconds: spent scoring.
    """

    task: str
    method: str
    budget: int | None
    seed: int | None
    pattern: str
    saturated: bool
    w_eff: float
    w_scored: float
    metrics: dict[str, Estimate]
    seconds: float

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> CellResult:
        """Read what `dataclasses.asdict` made."""
        metrics = {name: Estimate(**estimate) for name, estimate in facts["metrics"].items()}
        return cls(**{**facts, "metrics": metrics})


@dataclass(frozen=True)
class PrefillResult:
    """Prefill time of one method at one budget. `w_eff` is the mean over the whole prompt, which the fit meets."""

    method: str
    budget: int | None
    pattern: str
    saturated: bool
    w_eff: float
    milliseconds: list[float]

    @property
    def median(self) -> float | None:
        """None where saturated: nothing ran."""
        return statistics.median(self.milliseconds) if self.milliseconds else None


@dataclass(frozen=True)
class Summary:
    """Cells of one task, method and budget, over seeds.

    Attributes:
        value: mean of the task's headline metric, None where saturated.
        spread: sample standard deviation over seeds, None with fewer than two.
    """

    w_eff: float
    w_scored: float
    value: float | None
    spread: float | None


def summarise(cells: Iterable[CellResult], metric: str) -> Summary:
    """Sum up the cells of one task, method and budget."""
    cells = list(cells)
    values = [cell.metrics[metric].value for cell in cells if not cell.saturated]
    return Summary(
        w_eff=statistics.fmean(cell.w_eff for cell in cells),
        w_scored=statistics.fmean(cell.w_scored for cell in cells),
        value=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
    )
