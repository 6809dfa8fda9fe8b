"""Peak memory of one call."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .full_attention import full_attention
from .workloads import Inputs, Workload, attend, gradients


@dataclass(frozen=True)
class Memory:
    """Peak bytes above the inputs, forward or forward and backward; for the latter the gradients are included."""

    pattern: str
    length: int
    head_dim: int
    batch: int
    backward: bool
    extra_bytes: int


def measure_memory(
    name: str, workload: Workload, *, backward: bool, backend: str | None, full_kernel: str = "auto"
) -> Memory:
    """Peak memory of a method, or of "full" by `full_kernel`.

    On the CPU in a process of its own, so that no earlier call has warmed the allocator. On a CUDA device the allocator
    itself counts.
    """
    arguments = (name, workload, backward, backend, full_kernel)
    if torch.device(workload.device).type == "cuda":
        peak = _on_device(*arguments)
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(_on_cpu, arguments)
    return Memory(name, workload.length, workload.head_dim, workload.batch, backward, peak)


def _on_device(name: str, workload: Workload, backward: bool, backend: str | None, full_kernel: str) -> int:
    inputs = workload.inputs(requires_grad=backward)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _call(name, workload, inputs, backward, backend, full_kernel)
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(name: str, workload: Workload, backward: bool, backend: str | None, full_kernel: str) -> int:
    small = replace(workload, length=8 * workload.window)
    # Libraries allocate on first use.
    _call(name, small, small.inputs(requires_grad=backward), backward, backend, full_kernel)
    inputs = workload.inputs(requires_grad=backward)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak below; Linux
    before = _resident("VmRSS")
    _call(name, workload, inputs, backward, backend, full_kernel)
    return _resident("VmHWM") - before


def _call(name: str, workload: Workload, inputs: Inputs, backward: bool, backend: str | None, full_kernel: str) -> None:
    if name == "full":
        full = full_attention(full_kernel, length=workload.length, decodes=False)
        out = full(inputs.q, inputs.k, inputs.v)
    else:
        out = attend(name, workload.window, inputs, backend=backend)
    if backward:
        gradients(out, inputs)


def peak_memory() -> int | None:
    """The most bytes that this process has held, all libraries included; None where the system does not say."""
    return _resident("VmHWM") if sys.platform == "linux" else None


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))
