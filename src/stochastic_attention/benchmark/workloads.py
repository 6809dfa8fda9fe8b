"""What is measured: patterns by name, on inputs of one shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..ops.api import attention
from ..ops.pattern import Pattern

PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "swa": lambda w: Pattern.local(w),
    "sliding": lambda w: Pattern.stochastic(w),
    "block": lambda w: Pattern.stochastic(w, shape="block"),
    "prefix-sliding": lambda w: Pattern.stochastic(w, scope="prefix"),
    "prefix-block": lambda w: Pattern.stochastic(w, scope="prefix", shape="block"),
    "union": lambda w: Pattern.stochastic(w, local=w, sinks=4, correction=0.5),
    "moba": lambda w: Pattern.moba(block_size=max(1, w // 4), top_k=4),
}
# The paper's trained model: two softmaxes, each with a gate a head and token. So it has twice the keys of the others.
GATED = "gated"
METHODS = (*PATTERNS, GATED)

Direction = Literal["forward", "backward", "decode"]  # "backward" is both passes, "decode" one new token
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "decode")


def patterns_of(name: str, window: int) -> tuple[Pattern, ...]:
    """The patterns that a method of METHODS computes one after the other."""
    names = ("sliding", "swa") if name == GATED else (name,)
    return tuple(PATTERNS[part](window) for part in names)


@dataclass(frozen=True)
class Workload:
    """One shape of q, k and v, equal head counts, and where they live."""

    length: int
    heads: int
    head_dim: int
    window: int
    device: str
    dtype: str
    batch: int = 1

    def inputs(self, *, requires_grad: bool = False, newest: bool = False) -> Inputs:
        """Normal values, the same at every call; `newest`: a query of the last token alone."""
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = getattr(torch, self.dtype)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
            return x.requires_grad_(requires_grad)

        of_keys = (self.batch, self.heads, self.length, self.head_dim)
        of_queries = (self.batch, self.heads, 1 if newest else self.length, self.head_dim)
        k, v, q, cotangent = (draw(*shape) for shape in (of_keys, of_keys, of_queries, of_queries))
        place = torch.tensor([self.length - 1], device=self.device) if newest else None
        return Inputs(q, k, v, draw(2, *of_queries[:-1], 1), cotangent.detach(), place)


@dataclass(frozen=True)
class Inputs:
    """q and a cotangent of the output [B, H, Nq, D], k and v [B, H, N, D], the gates' logits [2, B, H, Nq, 1].

    `place` [1] is where the one query of a step of decoding stands, None for whole sequences.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    cotangent: Tensor
    place: Tensor | None


def attend(name: str, window: int, x: Inputs, *, backend: str | None, step: int = 0) -> Tensor:
    """A method's output, [B, H, Nq, D]; random patterns by the permutation of `step`."""
    options: dict[str, Any] = {"backend": backend, "step": step}
    if x.place is not None:
        options |= {"decode": True, "query_positions": x.place}
    parts = [attention(x.q, x.k, x.v, pattern, **options) for pattern in patterns_of(name, window)]
    if len(parts) == 1:
        return parts[0]
    first, second = (torch.sigmoid(gate) * part for gate, part in zip(x.gates, parts, strict=True))
    return first + second


def gradients(out: Tensor, x: Inputs) -> list[Tensor | None]:
    """Those of q, k, v and, where they are used, the gates."""
    return list(torch.autograd.grad(out, [x.q, x.k, x.v, x.gates], x.cotangent, allow_unused=True))
