"""Predicted times on a GPU, from counted work and assumed rates. Predictions, not measurements: nothing here is timed.

    seconds = operations and launches, each a fixed time, one after the other
            + bytes that planning writes and reads, at the memory's rate
            + the slowest of: products, bytes of memory, bytes of the cache, each at its rate

Full attention is given its best rate at every length, which speaks against the methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from ..tables import markdown
from .counts import Counts, count
from .sweep import Case
from .targets import SPEEDUPS
from .workloads import METHODS


@dataclass(frozen=True)
class Assumptions:
    """Rates that the predictions take for granted; shares are of the data sheet's rate, by head dimension.

    Attributes:
        card: whose data sheet.
        matmul: dense bfloat16 products, FLOP/s, and `memory`: of its memory, bytes/s: the data sheet's.
        cache: rows read again from the second-level cache, bytes/s.
        share_of_memory: of `memory` that a kernel reaches.
        share_of_matmul: of `matmul` that the kernels here reach on the tiles they compute, forward and backward.
        share_of_matmul_full: likewise full attention's fastest kernel, on the pairs below the diagonal.
        operation: seconds from one tensor operation or launch to the next when the host issues them.
        replayed: likewise in a CUDA graph, as steps of decoding are run.
        other_operations: a call's, beside those that plan it: allocations, checks, casts; forward and again backward.
    """

    card: str = "H200"
    matmul: float = 989e12
    memory: float = 4.8e12
    cache: float = 5.5e12
    share_of_memory: float = 0.8
    share_of_matmul: Mapping[str, Mapping[int, float]] = field(
        default_factory=lambda: {"forward": {64: 0.25, 128: 0.35}, "backward": {64: 0.18, 128: 0.25}}
    )
    share_of_matmul_full: Mapping[str, Mapping[int, float]] = field(
        default_factory=lambda: {"forward": {64: 0.45, 128: 0.65}, "backward": {64: 0.40, 128: 0.55}}
    )
    operation: float = 5e-6
    replayed: float = 2e-6
    other_operations: int = 16


@dataclass(frozen=True)
class Prediction:
    """Of one method and case. `target` is the speedup that is wanted of the better of SA's shapes, None elsewhere."""

    pattern: str
    direction: str
    length: int
    head_dim: int
    batch: int
    counts: Counts
    seconds: float
    seconds_of_planning: float
    full_seconds: float
    speedup: float
    speedup_planned_ahead: float
    target: float | None


PREDICTED = tuple(name for name in METHODS if name != "moba")


def predict(
    cases: Iterable[Case],
    names: Iterable[str],
    *,
    heads: int,
    window: int,
    assumed: Assumptions,
) -> list[Prediction]:
    """A prediction for each case and each of the `names`, of PREDICTED. Counting takes some seconds a long case."""
    predictions = []
    for case in cases:
        full = _full_seconds(case, heads, assumed)
        for name in names:
            counts = count(name, case, heads=heads, window=window)
            planning = _planning_seconds(case, counts, assumed)
            seconds = planning + _kernel_seconds(case, counts, assumed)
            target = SPEEDUPS.get(case.length) if name in ("sliding", "block") and case.direction != "decode" else None
            predictions.append(
                Prediction(
                    name,
                    **asdict(case),
                    counts=counts,
                    seconds=seconds,
                    seconds_of_planning=planning,
                    full_seconds=full,
                    speedup=full / seconds,
                    speedup_planned_ahead=full / (seconds - planning),
                    target=target,
                )
            )
    return predictions


def _planning_seconds(case: Case, counts: Counts, assumed: Assumptions) -> float:
    written_and_read = 2 * counts.planned_bytes / (assumed.memory * assumed.share_of_memory)
    if case.direction == "decode":
        return counts.operations * assumed.replayed + written_and_read
    others = assumed.other_operations * (2 if case.direction == "backward" else 1)
    return (counts.operations + others) * assumed.operation + written_and_read


def _kernel_seconds(case: Case, counts: Counts, assumed: Assumptions) -> float:
    memory = counts.bytes_of_memory / (assumed.memory * assumed.share_of_memory)
    if case.direction == "decode":
        return counts.kernels * assumed.replayed + memory
    products = counts.flops / (assumed.matmul * _share(assumed.share_of_matmul, case))
    return counts.kernels * assumed.operation + max(products, memory, counts.bytes_of_cache / assumed.cache)


def _full_seconds(case: Case, heads: int, assumed: Assumptions) -> float:
    copies = case.batch * heads
    if case.direction == "decode":
        read = 2 * case.length * case.head_dim * 2 * copies
        return 2 * assumed.replayed + read / (assumed.memory * assumed.share_of_memory)
    pairs = case.length * (case.length + 1) // 2 * copies
    products = 2 + (5 if case.direction == "backward" else 0)
    launches = 1 + (3 if case.direction == "backward" else 0)
    rate = assumed.matmul * _share(assumed.share_of_matmul_full, case)
    return launches * assumed.operation + 2 * products * case.head_dim * pairs / rate


def _share(shares: Mapping[str, Mapping[int, float]], case: Case) -> float:
    by_dim = shares[case.direction]
    if case.head_dim not in by_dim:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, by_dim))} to be predicted, got {case.head_dim}")
    return by_dim[case.head_dim]


def table(predictions: Iterable[Prediction], assumed: Assumptions) -> str:
    """Every prediction in Markdown, beside the target where it has one."""
    rows = [
        (
            *("predicted", "n", "D", "B", "method", "ms", "planning, ms", "full, ms", "speedup", "planned ahead"),
            *("target", "computed / needed"),
        )
    ]
    rows += [
        (
            {"forward": "forward", "backward": "forward + backward", "decode": "decode"}[p.direction],
            f"{p.length:,}",
            str(p.head_dim),
            str(p.batch),
            p.pattern,
            f"{p.seconds * 1e3:.3f}",
            f"{p.seconds_of_planning * 1e3:.3f}",
            f"{p.full_seconds * 1e3:.3f}",
            f"{p.speedup:.2f}x",
            f"{p.speedup_planned_ahead:.2f}x",
            "" if p.target is None else f"{p.target:g}x",
            f"{p.counts.pairs_computed / p.counts.pairs_needed:.2f}",
        )
        for p in predictions
    ]
    return (
        f"Predicted, not measured: an {assumed.card} by its data sheet and assumed shares of it. "
        "*Planned ahead*: without the operations that plan a call.\n\n" + markdown(rows)
    )
