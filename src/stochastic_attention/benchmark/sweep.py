"""Many cases within a budget of time: the small ones first, so that what is left out is the largest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .workloads import DIRECTIONS, Direction

Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One shape in one direction."""

    direction: Direction
    length: int
    head_dim: int
    batch: int

    @property
    def work(self) -> int:
        """What the time of full attention grows with."""
        pairs = self.length if self.direction == "decode" else self.length**2
        return pairs * self.head_dim * self.batch * (3 if self.direction == "backward" else 1)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `seconds` of steady running, compiling and warming up left out; or why it has no rows."""

    direction: Direction
    length: int
    head_dim: int
    batch: int
    seconds: float | None
    reason: str | None = None

    @classmethod
    def of(cls, case: Case, seconds: float | None, reason: str | None = None) -> Outcome:
        """That of `case`."""
        return cls(**asdict(case), seconds=seconds, reason=reason)

    @property
    def case(self) -> Case:
        """The case."""
        return Case(self.direction, self.length, self.head_dim, self.batch)


def cases(
    directions: Iterable[Direction], lengths: Iterable[int], head_dims: Iterable[int], *, tokens: int
) -> list[Case]:
    """Every combination, in the order of the options; the batch is as large as `tokens` allow, and at least 1."""
    head_dims, directions = tuple(head_dims), tuple(directions)
    return [
        Case(direction, length, head_dim, max(1, tokens // length))
        for length in lengths
        for head_dim in head_dims
        for direction in directions
    ]


def sweep(
    todo: Iterable[Case],
    measure: Callable[[Case], tuple[Rows, float]],
    results: dict[str, Any],
    *,
    save: Callable[[], object],
    budget: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure each case and append its rows to `results`, saved after each; those with rows are done.

    `measure` returns rows by kind, and the seconds of steady running that they took. With a `budget` of seconds, small
    cases come first, and one that would not end in time, as far as the largest of its direction tells, is left out.
    `results["cases"]` says what came of each case. A case that fails says why, and the others go on.
    """
    begin = clock()
    known = [Outcome(**row) for row in results.setdefault("cases", [])]
    done = [outcome for outcome in known if outcome.seconds is not None]
    results["cases"] = [asdict(outcome) for outcome in done]
    todo = [case for case in todo if case not in {outcome.case for outcome in done}]
    if budget is not None:
        todo.sort(key=lambda case: (case.work, DIRECTIONS.index(case.direction)))
    for case in todo:
        if budget is not None:
            left = budget - (clock() - begin)
            expected = _expected(case, done)
            if left <= 0 or expected > left:
                reason = f"left out: {max(0.0, left):.0f} s are left, and it would take {expected:.0f} s or more"
                results["cases"].append(asdict(Outcome.of(case, None, reason)))
                save()
                continue
        try:
            rows, seconds = measure(case)
        except Exception as error:  # out of memory, or whatever a compiler raises: the other cases are still wanted
            results["cases"].append(asdict(Outcome.of(case, None, f"failed: {in_a_line(error)}")))
        else:
            for kind, of_kind in rows.items():
                results.setdefault(kind, []).extend(of_kind)
            done.append(Outcome.of(case, seconds))
            results["cases"].append(asdict(done[-1]))
        save()


def in_a_line(error: Exception) -> str:
    """What kind of error it is, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _expected(case: Case, done: Iterable[Outcome]) -> float:
    """Seconds of steady running by the largest case done in its direction, grown as full attention grows."""
    same = [o for o in done if o.direction == case.direction and o.seconds is not None and o.case.work <= case.work]
    if not same:
        return 0.0
    largest = max(same, key=lambda o: o.case.work)
    return (largest.seconds or 0.0) * case.work / largest.case.work
