"""Time and peak memory of the op against torch's own full causal attention, as ratios within one run.

Nothing is timed before every pattern has agreed with the oracle on the device and dtype at hand.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .ops.api import attention
from .ops.pattern import Pattern

PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "swa": lambda w: Pattern.local(w),
    "sliding": lambda w: Pattern.stochastic(w),
    "block": lambda w: Pattern.stochastic(w, shape="block"),
    "prefix-sliding": lambda w: Pattern.stochastic(w, scope="prefix"),
    "prefix-block": lambda w: Pattern.stochastic(w, scope="prefix", shape="block"),
    "union": lambda w: Pattern.stochastic(w, local=w, sinks=4, correction=0.5),
    "moba": lambda w: Pattern.moba(block_size=max(1, w // 4), top_k=4),
}

_GATE_LENGTH = 257


@dataclass(frozen=True)
class Workload:
    """One shape of q, k and v: batch 1, equal head counts, and where they live."""

    length: int
    heads: int
    head_dim: int
    window: int
    device: str
    dtype: str

    def tensors(self, count: int = 3, *, requires_grad: bool = False) -> list[torch.Tensor]:
        """`count` tensors [1, heads, length, head_dim] of normal values, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.heads, self.length, self.head_dim)
        drawn = (torch.randn(shape, generator=generator) for _ in range(count))
        return [x.to(self.device, getattr(torch, self.dtype)).requires_grad_(requires_grad) for x in drawn]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one pattern, torch's full causal attention in the same run, and how many times faster it is."""

    pattern: str
    length: int
    backward: bool
    seconds: float
    full_seconds: float
    speedup: float


@dataclass(frozen=True)
class Memory:
    """Peak bytes above the inputs, forward or forward and backward; for the latter the gradients are included."""

    pattern: str
    length: int
    backward: bool
    extra_bytes: int


def check_against_oracle(names: Iterable[str], like: Workload, backend: str | None) -> None:
    """Raise RuntimeError where a pattern's output or gradients differ from the oracle's beyond rounding."""
    workload = Workload(**{**asdict(like), "length": _GATE_LENGTH, "window": min(like.window, 32)})
    q, k, v = workload.tensors(requires_grad=True)
    (cotangent,) = workload.tensors(1)
    tolerance = 4 * float(torch.finfo(v.dtype).eps) ** 0.5 if v.dtype.itemsize < 4 else 2e-4
    for name in names:
        pattern = PATTERNS[name](workload.window)
        found = []
        for choice in (backend, "reference"):
            out = attention(q, k, v, pattern, backend=choice)
            found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent)])
        for what, ours, oracles in zip(("out", "dq", "dk", "dv"), *found, strict=True):
            error = float((ours - oracles).abs().max() / oracles.abs().max())
            if not error <= tolerance:
                raise RuntimeError(f"{name}: {what} is off the oracle by {error:.1e} of its largest value; not timed")


def measure_speed(
    names: Iterable[str], workload: Workload, *, backward: bool, repeats: int, backend: str | None
) -> list[Timing]:
    """Time each pattern against full attention, one after the other in every round, and take medians over rounds."""
    q, k, v = workload.tensors(requires_grad=backward)
    (cotangent,) = workload.tensors(1)

    def seconds(op: Callable[[], torch.Tensor]) -> float:
        _synchronise(workload.device)
        begin = time.perf_counter()
        out = op()
        if backward:
            torch.autograd.grad(out, (q, k, v), cotangent)
        _synchronise(workload.device)
        return time.perf_counter() - begin

    def run(pattern: Pattern) -> Callable[[], torch.Tensor]:
        return lambda: attention(q, k, v, pattern, backend=backend)

    ops = {name: run(PATTERNS[name](workload.window)) for name in names}
    for op in ops.values():
        seconds(op)
    rounds: dict[str, list[float]] = {name: [] for name in ("full", *ops)}
    for _ in range(repeats):
        rounds["full"].append(seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        for name, op in ops.items():
            rounds[name].append(seconds(op))
    median = {name: statistics.median(times) for name, times in rounds.items()}
    return [
        Timing(name, workload.length, backward, median[name], median["full"], median["full"] / median[name])
        for name in ops
    ]


def measure_memory(name: str, workload: Workload, *, backward: bool, backend: str | None) -> Memory:
    """Peak memory of one call, in a process of its own so that no earlier call has warmed the allocator."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (name, workload, backward, backend))


def _peak(name: str, workload: Workload, backward: bool, backend: str | None) -> Memory:
    small = Workload(**{**asdict(workload), "length": 8 * workload.window})
    _call(name, small, backward, backend)  # libraries allocate on first use
    q, k, v = workload.tensors(requires_grad=backward)
    (cotangent,) = workload.tensors(1)
    on_cpu = torch.device(workload.device).type == "cpu"
    if on_cpu:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak below; Linux
        before = _resident("VmRSS")
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = attention(q, k, v, PATTERNS[name](workload.window), backend=backend)
    if backward:
        torch.autograd.grad(out, (q, k, v), cotangent)
    peak = _resident("VmHWM") if on_cpu else torch.cuda.max_memory_allocated()
    return Memory(name, workload.length, backward, peak - before)


def _call(name: str, workload: Workload, backward: bool, backend: str | None) -> None:
    q, k, v = workload.tensors(requires_grad=backward)
    out = attention(q, k, v, PATTERNS[name](workload.window), backend=backend)
    if backward:
        torch.autograd.grad(out.sum(), (q, k, v))


def peak_memory() -> int | None:
    """The most bytes that this process has held, all libraries included; None where the system does not say."""
    return _resident("VmHWM") if sys.platform == "linux" else None


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def _synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
