"""Time of methods against full attention, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, repeat
from typing import Literal

from torch import Tensor

from ..ops.keys_per_query import keys_per_query
from .full_attention import full_attention
from .sweep import in_a_line
from .timing import Op, medians, replayed, stopwatch
from .workloads import Direction, Inputs, Workload, attend, gradients, patterns_of

Draw = Literal["once", "always"]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one method, those of the fastest full attention in the same run, and the ratio.

    `limit` is how many times fewer pairs of query and key the method has than full attention: the speedup where every
    pair costs the same and nothing else costs anything.
    """

    pattern: str
    length: int
    head_dim: int
    batch: int
    backward: bool
    seconds: float
    full_kernel: str
    full_seconds: float
    speedup: float
    limit: float


@dataclass(frozen=True)
class FullTiming:
    """Median seconds of full attention by one kernel; None where it is not to be had, and why."""

    kernel: str
    length: int
    head_dim: int
    batch: int
    direction: Direction
    seconds: float | None
    reason: str | None = None


def measure_speed(
    names: Iterable[str],
    workload: Workload,
    direction: Direction,
    *,
    repeats: int,
    backend: str | None,
    full_kernels: Iterable[str] = ("auto",),
    replay: bool = False,
    draw: Draw = "once",
) -> tuple[list[Timing], list[FullTiming]]:
    """Time each method, and full attention by each of its kernels.

    On a CUDA device a step of decoding is run as a CUDA graph, and with `replay` everything is: no host in between.
    `draw` "always" gives every call a permutation of its own, as in training; with "once" a backend may keep what it
    has sorted, as in evaluation.

    Raises:
        RuntimeError: none of the kernels of full attention takes the call.
    """
    decodes = direction == "decode"
    inputs = workload.inputs(requires_grad=direction == "backward", newest=decodes)

    def complete(forward: Callable[[], Tensor]) -> Op:
        op: Op = (lambda: gradients(forward(), inputs)) if direction == "backward" else forward
        return replayed(op, workload.device) if decodes or replay else op

    fulls, missing = _full_attention(full_kernels, workload, inputs, decodes=decodes)
    if not fulls:
        raise RuntimeError(f"no kernel of full attention takes the call: {missing}")
    ops: dict[str, Callable[[], Tensor]] = {f"full {kernel}": op for kernel, op in fulls.items()}
    steps = count() if draw == "always" else repeat(0)
    for name in names:
        ops[name] = lambda name=name: attend(name, workload.window, inputs, backend=backend, step=next(steps))
    completed = {name: complete(op) for name, op in ops.items()}
    seconds = medians(completed, stopwatch(workload.device, short=decodes), repeats=repeats)

    shape = (workload.length, workload.head_dim, workload.batch)
    of_full = {kernel: seconds.pop(f"full {kernel}") for kernel in fulls}
    fastest = min(of_full, key=of_full.__getitem__)
    best = of_full[fastest]
    timings = [
        Timing(name, *shape, direction == "backward", own, fastest, best, best / own, _limit(name, workload, decodes))
        for name, own in seconds.items()
    ]
    full_timings = [FullTiming(kernel, *shape, direction, own) for kernel, own in of_full.items()]
    full_timings += [FullTiming(kernel, *shape, direction, None, reason) for kernel, reason in missing.items()]
    return timings, full_timings


def _full_attention(
    kernels: Iterable[str], workload: Workload, inputs: Inputs, *, decodes: bool
) -> tuple[dict[str, Callable[[], Tensor]], Mapping[str, str]]:
    """Those that take the call, by name, and why the others do not."""
    fulls, missing = {}, {}
    for kernel in kernels:
        try:
            full = full_attention(kernel, length=workload.length, decodes=decodes)
            full(inputs.q, inputs.k, inputs.v)
        except Exception as error:  # each kernel and each compiler has its own way to refuse
            missing[kernel] = in_a_line(error)
            continue
        fulls[kernel] = lambda full=full: full(inputs.q, inputs.k, inputs.v)
    return fulls, missing


def _limit(name: str, workload: Workload, decodes: bool) -> float:
    n = workload.length
    return (n if decodes else n * (n + 1) // 2) / pairs_needed(name, workload.window, n, n - 1 if decodes else 0)


@cache
def pairs_needed(name: str, window: int, length: int, first: int = 0) -> int:
    """Pairs of a key and a query, of those from `first` on, that a method attends to: of one head and row."""
    return sum(int(keys_per_query(p, length, first=first).sum()) for p in patterns_of(name, window))
