"""Successive halving: many candidates on few windows of text, the best third of them on three times as many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# A rung keeps one in so many, and its survivors see so many times the windows.
_FACTOR = 3


@dataclass(frozen=True)
class Rung:
    """A step of the search.

    Attributes:
        entrants: candidates that take part, the best of the rung before.
        windows: what they see that they have not seen.
    """

    entrants: int
    windows: range


def rungs(candidates: int, windows: int, finalists: int) -> list[Rung]:
    """The steps that leave `finalists` of so many candidates; no step once there are no more than that."""
    found: list[Rung] = []
    seen, upto = 0, 1
    while candidates > finalists:
        found.append(Rung(candidates, range(seen, upto)))
        seen, upto = upto, min(windows, _FACTOR * upto)
        candidates = max(finalists, math.ceil(candidates / _FACTOR)) if seen < windows else finalists
    return found


def halve(candidates: Sequence[T], steps: Sequence[Rung], finalists: int, loss: Callable[[T, range], float]) -> list[T]:
    """The `finalists` with the least summed loss, the best first; the earliest wins a tie.

    Args:
        candidates: who take part in the first of the `steps`.
        steps: see `rungs`.
        finalists: how many are wanted.
        loss: of a candidate on windows, all of which it sees once.
    """
    alive = [(0.0, place) for place in range(len(candidates))]
    for step in steps:
        alive = sorted(
            (total + loss(candidates[place], step.windows), place) for total, place in sorted(alive)[: step.entrants]
        )
    return [candidates[place] for _, place in sorted(alive)[:finalists]]
