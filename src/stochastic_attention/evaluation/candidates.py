"""What a recommendation is chosen from: unions of local, sink and stochastic keys, in all layers or in some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from ..hf.presets import Preset
from ..ops.pattern import Pattern, Scope, Shape
from .budget import Match, Queries, closest

SHARES = (0.25, 0.5, 0.75)
SINKS = (1, 4, 16)
CORRECTIONS = (0.0, 0.5, 1.0)
# The layers, of a number of them, that get the union; the others get a window and sinks at the same budget.
LAYERS: dict[str, Callable[[int], Sequence[int]]] = {
    "all": range,
    "every 2nd": lambda count: range(1, count, 2),
    "first half": lambda count: range(count // 2),
    "second half": lambda count: range(count // 2, count),
}


@dataclass(frozen=True)
class Candidate:
    """A point of the search.

    Attributes:
        share: of the budget that is spent on the local window, sinks aside; the rest goes to stochastic keys.
        sinks, correction, scope, shape: see `Pattern.stochastic`.
        layers: a name from `LAYERS`.
    """

    share: float
    sinks: int
    correction: float
    scope: Scope
    shape: Shape
    layers: str

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} local, {self.sinks} sinks, correction {self.correction}, {self.scope} {self.shape}, "
            f"{self.layers} layers"
        )

    def preset(self, queries: Queries, budget: int, match: Match, layers: int) -> Preset:
        """What it runs in a model of so many layers: every layer at the budget in expectation, on these queries."""

        def union(window: int, local: int) -> Pattern:
            return Pattern.stochastic(
                window,
                local=local,
                sinks=self.sinks,
                correction=self.correction,
                scope=self.scope,
                shape=self.shape,
            )

        local = max(1, round(self.share * (budget - self.sinks)))
        windows = (union(window, local) for window in range(1, 2 * budget))
        nearest = closest(windows, queries, budget, match)
        # A prefix of window * 2**m positions allows few budgets; the local window makes up for what is left.
        refined = (union(nearest.reach, near) for near in range(1, 2 * local + 1))
        pattern = closest(refined, queries, budget, match)
        chosen = LAYERS[self.layers](layers)
        if len(chosen) == layers:
            return Preset(pattern, "all")
        window = closest((Pattern.local(w, self.sinks) for w in range(1, 2 * budget)), queries, budget, match)
        return Preset({index: pattern if index in chosen else window for index in range(layers)})


def draw_candidates(count: int, budget: int) -> list[Candidate]:
    """`count` points of the grid, always the same ones; ValueError where there are fewer at this budget."""
    grid = [
        Candidate(*point)
        for point in itertools.product(
            SHARES,
            [sinks for sinks in SINKS if 2 * sinks <= budget],
            CORRECTIONS,
            get_args(Scope),
            get_args(Shape),
            LAYERS,
        )
    ]
    if not grid:
        raise ValueError(f"budget must be at least {2 * min(SINKS)} for a recommendation, got {budget}")
    if not 1 <= count <= len(grid):
        raise ValueError(f"candidates must be in [1, {len(grid)}] at budget {budget}, got {count}")
    return random.Random(0).sample(grid, count)
