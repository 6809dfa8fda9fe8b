"""Clocks: seconds of a call, on the CPU by the wall clock, on a CUDA device by its own events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Op = Callable[[], object]
Stopwatch = Callable[[Op], float]

_CALLS = 20  # of a short op in one measurement: one is too short for the wall clock
_MORE_THAN_ANY_CACHE = 256 * 2**20  # bytes


def stopwatch(device: str, *, short: bool = False) -> Stopwatch:
    """Measures one call of an op, in seconds; `short` ones are repeated where the clock is coarse.

    On a CUDA device the second-level cache is overwritten before the call, and time runs from when the device begins
    to when it ends. What the host does meanwhile counts where the device waits for it.
    """
    if torch.device(device).type != "cuda":
        return lambda op: _by_wall_clock(op, _CALLS if short else 1)
    flush = torch.empty(_MORE_THAN_ANY_CACHE, dtype=torch.uint8, device=device)

    def seconds(op: Op) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        op()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    return seconds


def _by_wall_clock(op: Op, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        op()
    return (time.perf_counter() - begin) / calls


def medians(ops: Mapping[str, Op], measure: Stopwatch, *, repeats: int) -> dict[str, float]:
    """Median seconds of each op: once to warm up, then in turns, so that a slow moment of the machine meets all."""
    for op in ops.values():
        op()
    rounds = [{name: measure(op) for name, op in ops.items()} for _ in range(repeats)]
    return {name: statistics.median(times[name] for times in rounds) for name in ops}


def replayed(op: Op, device: str) -> Op:
    """`op` as a CUDA graph, as servers run a step of decoding: the host then costs nothing. Elsewhere `op` itself."""
    if torch.device(device).type != "cuda":
        return op
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what is made on first use must not become part of the graph
        for _ in range(2):
            op()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op()
    return graph.replay
