"""Agreement with the oracle on the device at hand: the gate before anything is timed, and a thorough check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.api import attention
from .sweep import in_a_line
from .workloads import PATTERNS, Workload, attend, gradients

_WIDEST = 256  # window of the gate, whose oracle takes the square of its length


def check_against_oracle(names: Iterable[str], like: Workload, backend: str | None) -> None:
    """Raise RuntimeError where a method's output or gradients differ from the oracle's beyond rounding."""
    workload = _small(like)
    inputs = workload.inputs(requires_grad=True)
    for name in names:
        found = []
        for choice in (backend, "reference"):
            out = attend(name, workload.window, inputs, backend=choice)
            found.append([out.detach(), *gradients(out, inputs)])
        for what, ours, oracles in zip(("out", "dq", "dk", "dv", "d_gates"), *found, strict=True):
            if ours is not None:
                _compare(name, what, ours, oracles)


def check_decoding_against_oracle(names: Iterable[str], like: Workload, backend: str | None) -> None:
    """Raise RuntimeError where a method's output for the newest token differs from the oracle's beyond rounding."""
    workload = _small(like)
    inputs = workload.inputs(newest=True)
    for name in names:
        ours, oracles = (attend(name, workload.window, inputs, backend=x) for x in (backend, "reference"))
        _compare(name, "out", ours, oracles)


@dataclass(frozen=True)
class Check:
    """One pattern of PATTERNS to be checked in one dtype, with a softcap and sink logits or without."""

    pattern: str
    dtype: str
    head_dim: int
    window: int
    lengths: tuple[int, ...]
    device: str
    backend: str | None
    capped: bool

    def failures(self) -> list[str]:
        """What differs from the oracle: out, lse and gradients, of one document, of several, and of few queries."""
        found = []
        for length in self.lengths:
            for use in ("single", "packed", "newest"):
                label = f"{self.pattern} {self.dtype} D={self.head_dim} n={length} {use}"
                try:
                    found += [f"{label}: {error}" for error in self._differences(length, use)]
                except Exception as error:  # whatever a compiler raises: the other lengths are still of interest
                    found.append(f"{label}: {in_a_line(error)}")
        return found

    def _differences(self, length: int, use: str) -> list[str]:
        pattern = PATTERNS[self.pattern](self.window)
        draw = torch.Generator(self.device).manual_seed(length)
        # Compiled kernels know whether numbers of heads are multiples of 16, and whether rows differ in their order: as
        # they do in the capped check alone, so that the others compile what is timed and no more.
        batch, heads, kv_heads, queries = 1 + self.capped, 32, 16, min(5, length) if use == "newest" else length
        dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=draw, device=self.device, dtype=torch.float32)
            return x.to(dtype).requires_grad_()

        q, k, v, cotangent = (
            normal(batch, *shape, self.head_dim)
            for shape in ((heads, queries), (kv_heads, length), (kv_heads, length), (heads, queries))
        )
        options: dict[str, Any] = {"layer": 3, "step": 5, "return_lse": True}
        if use == "newest":
            options |= {"query_positions": torch.arange(length - queries, length, device=self.device), "decode": True}
        if use == "packed":
            index = torch.arange(length, device=self.device)
            padded_on_the_left = (index >= length // 3).long() + (index >= 2 * length // 3).long() - 1
            options["documents"] = torch.stack([padded_on_the_left, (index >= length // 2).long()])[:batch]
        if self.capped:
            options |= {"softcap": 5.0, "sink_logits": torch.linspace(-1, 1, heads, device=self.device)}
        found = []
        for backend in (self.backend, "reference"):
            out, lse = attention(q, k, v, pattern, backend=backend, **options)
            finite = lse.masked_fill(lse.isinf(), 0.0)
            grads = torch.autograd.grad(
                (out, finite.sum()), (q, k, v), (cotangent.detach(), torch.ones_like(finite.sum()))
            )
            found.append({"out": out, "lse": finite, "dq": grads[0], "dk": grads[1], "dv": grads[2]})
        ours, oracles = found
        errors = {name: _error(ours[name].detach(), oracles[name].detach()) for name in ours}
        return [
            f"{name} is off the oracle by {error:.1e} of its largest value"
            for name, error in errors.items()
            if not error <= tolerance(torch.float32 if name == "lse" else dtype)
        ]


def tolerance(dtype: torch.dtype) -> float:
    """Of the largest value. Half precision is rounded at the end, and what it is made of a few times before."""
    return 4 * float(torch.finfo(dtype).eps) if dtype.itemsize < 4 else 2e-5


def _small(like: Workload) -> Workload:
    # Kernels are compiled for a window: the check compiles those that are timed.
    window = min(like.window, _WIDEST)
    return replace(like, length=max(257, 4 * window + 1), window=window, batch=1)


def _error(ours: Tensor, oracles: Tensor) -> float:
    largest = oracles.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((ours.double() - oracles.double()).abs().max() / largest)


def _compare(name: str, what: str, ours: Tensor, oracles: Tensor) -> None:
    error = _error(ours, oracles)
    if not error <= tolerance(ours.dtype):
        raise RuntimeError(f"{name}: {what} is off the oracle by {error:.1e} of its largest value; not timed")
