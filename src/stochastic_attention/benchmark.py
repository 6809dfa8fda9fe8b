"""Time and peak memory of the op against torch's own full causal attention, as ratios within one run.

Nothing is timed before every pattern has agreed with the oracle on the device and dtype at hand.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .ops.api import attention
from .ops.keys_per_query import keys_per_query
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
_STEPS = 20  # of decoding in one measurement: a step is too short for the clock


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
    """Median seconds of one pattern, torch's full causal attention in the same run, and how many times faster it is.

    `limit` is how many times fewer pairs of query and key the pattern has than full attention: the speedup where every
    pair costs the same and nothing else costs anything.
    """

    pattern: str
    length: int
    backward: bool
    seconds: float
    full_seconds: float
    speedup: float
    limit: float


@dataclass(frozen=True)
class Memory:
    """Peak bytes above the inputs, forward or forward and backward; for the latter the gradients are included."""

    pattern: str
    length: int
    backward: bool
    extra_bytes: int


def check_against_oracle(names: Iterable[str], like: Workload, backend: str | None) -> None:
    """Raise RuntimeError where a pattern's output or gradients differ from the oracle's beyond rounding."""
    workload = _small(like)
    q, k, v = workload.tensors(requires_grad=True)
    (cotangent,) = workload.tensors(1)
    for name in names:
        pattern = PATTERNS[name](workload.window)
        found = []
        for choice in (backend, "reference"):
            out = attention(q, k, v, pattern, backend=choice)
            found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent)])
        for what, ours, oracles in zip(("out", "dq", "dk", "dv"), *found, strict=True):
            _compare(name, what, ours, oracles)


def check_decoding_against_oracle(names: Iterable[str], like: Workload, backend: str | None) -> None:
    """Raise RuntimeError where a pattern's output for the newest token differs from the oracle's beyond rounding."""
    workload = _small(like)
    for name in names:
        ours, oracles = (_decode(name, workload, choice)() for choice in (backend, "reference"))
        _compare(name, "out", ours, oracles)


def _small(like: Workload) -> Workload:
    return Workload(**{**asdict(like), "length": _GATE_LENGTH, "window": min(like.window, 32)})


def _compare(name: str, what: str, ours: torch.Tensor, oracles: torch.Tensor) -> None:
    tolerance = 4 * float(torch.finfo(ours.dtype).eps) ** 0.5 if ours.dtype.itemsize < 4 else 2e-4
    error = float((ours - oracles).abs().max() / oracles.abs().max())
    if not error <= tolerance:
        raise RuntimeError(f"{name}: {what} is off the oracle by {error:.1e} of its largest value; not timed")


def measure_speed(
    names: Iterable[str], workload: Workload, *, backward: bool, repeats: int, backend: str | None
) -> list[Timing]:
    """Time each pattern against full attention."""
    q, k, v = workload.tensors(requires_grad=backward)
    (cotangent,) = workload.tensors(1)

    def run(op: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(op(), (q, k, v), cotangent)) if backward else op

    def attend(pattern: Pattern) -> Callable[[], torch.Tensor]:
        return lambda: attention(q, k, v, pattern, backend=backend)

    ops = {"full": run(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))}
    ops |= {name: run(attend(PATTERNS[name](workload.window))) for name in names}
    return _time(ops, workload, backward=backward, repeats=repeats)


def measure_decoding(names: Iterable[str], workload: Workload, *, repeats: int, backend: str | None) -> list[Timing]:
    """Time one step of decoding, the newest of `length` tokens against all of them, against full attention's step."""
    q, k, v = _newest(workload)
    ops = {"full": lambda: F.scaled_dot_product_attention(q, k, v)}
    ops |= {name: _decode(name, workload, backend) for name in names}
    return _time(ops, workload, backward=False, repeats=repeats, queries=slice(-1, None), calls=_STEPS)


def _newest(workload: Workload) -> list[torch.Tensor]:
    q, k, v = workload.tensors()
    return [q[:, :, -1:], k, v]


def _decode(name: str, workload: Workload, backend: str | None) -> Callable[[], torch.Tensor]:
    q, k, v = _newest(workload)
    place = torch.tensor([workload.length - 1], device=q.device)
    pattern = PATTERNS[name](workload.window)
    return lambda: attention(q, k, v, pattern, query_positions=place, decode=True, backend=backend)


def _time(
    ops: Mapping[str, Callable[[], object]],
    workload: Workload,
    *,
    backward: bool,
    repeats: int,
    queries: slice = slice(None),
    calls: int = 1,
) -> list[Timing]:
    """Run the ops of some `queries` in turns, each `calls` times a round, and take medians over rounds."""

    def seconds(op: Callable[[], object]) -> float:
        _synchronise(workload.device)
        begin = time.perf_counter()
        for _ in range(calls):
            op()
        _synchronise(workload.device)
        return (time.perf_counter() - begin) / calls

    for op in ops.values():
        op()
    rounds = [{name: seconds(op) for name, op in ops.items()} for _ in range(repeats)]
    median = {name: statistics.median(times[name] for times in rounds) for name in ops}
    full = median.pop("full")
    pairs_of_full = int(torch.arange(1, workload.length + 1)[queries].sum())

    def limit(name: str) -> float:
        keys = keys_per_query(PATTERNS[name](workload.window), workload.length)
        return pairs_of_full / int(keys[:, queries].sum())

    return [Timing(name, workload.length, backward, own, full, full / own, limit(name)) for name, own in median.items()]


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
