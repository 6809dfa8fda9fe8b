"""Inputs that the op's tests share, and the one way to compare two runs of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stochastic_attention import Pattern
from stochastic_attention import attention as op

FULL = Pattern.full()
MOBA = Pattern.moba(block_size=4, top_k=3)
# One pattern of every way to draw.
DRAWING = [Pattern.stochastic(4), Pattern.stochastic(4, scope="prefix"), Pattern.bigbird(4, 2)]


def union(window: int, **options) -> Pattern:
    """One softmax over the stochastic keys, a local window and two sinks, with the correction."""
    return Pattern.stochastic(window, local=3, sinks=2, correction=0.5, **options)


def stochastic_patterns(window: int) -> list[Pattern]:
    """Both scopes and both shapes, alone and in a union, shared and per head."""
    return [
        make(window, scope=scope, shape=shape, seed=7, per_head=per_head)
        for make, per_head in ((Pattern.stochastic, False), (union, True))
        for scope in ("sequence", "prefix")
        for shape in ("sliding", "block")
    ]


def all_patterns(window: int) -> list[Pattern]:
    """Every kind of pattern, at one window."""
    return [
        FULL,
        Pattern.local(window),
        Pattern.local(window, sinks=2),
        Pattern.strided(window, 3),
        Pattern.strided(None, 4, local=3, sinks=2),
        Pattern.bigbird(window, 2, seed=7),
        Pattern.bigbird(4, 1, local=5, sinks=2),
        MOBA,
        *stochastic_patterns(window),
    ]


def is_causal_only(pattern: Pattern) -> bool:
    """Whether causal=False is refused."""
    return pattern.kind in ("bigbird", "moba") or (pattern.kind == "stochastic" and pattern.scope == "prefix")


# How the tokens of two rows are laid out, given their number.
LAYOUTS: dict[str, Callable[[int], Tensor | None]] = {
    "single": lambda _n: None,
    "left-padded": lambda n: torch.stack([torch.arange(n) >= n // 3, torch.arange(n) >= n - 1]).long() - 1,
    "right-padded": lambda n: torch.stack([torch.arange(n) < n - n // 4, torch.arange(n) < 1]).long() - 1,
    "packed": lambda n: torch.stack([torch.arange(n) * 2 // n, (torch.arange(n) >= n - 1).long()]),
    "packed-and-padded": lambda n: torch.stack([torch.arange(n) * 4 // n - 1, 1 - torch.arange(n) * 3 // n]),
    "interleaved": lambda n: torch.stack([torch.arange(n) % 3 - 1, torch.arange(n) % 2 * 5]),
    "all-padding": lambda n: torch.stack([torch.full((n,), -1), torch.zeros(n, dtype=torch.int64)]),
}


def tensors(
    n: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    queries: int | None = None,
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q [B, Hq, Nq, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv]; heads = (Hq, Hkv), dims = (D, Dv)."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads[0], n if queries is None else queries, dims[0]),
        (batch, heads[1], n, dims[0]),
        (batch, heads[1], n, dims[1]),
    )
    q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, backend: str | None = None, **options):
    """The op by one backend; `gather`, which is for few queries that are not all the keys, is given them in chunks."""
    if backend != "gather":
        return op(q, k, v, pattern, backend=backend, **options)
    n = k.shape[2]
    if pattern.kind == "moba" or not options.get("causal", True) or 0 in (len(q), q.shape[2], n):
        pytest.skip("gather does not take this call")
    size = max(1, min(n - 1, 64))
    places = options.pop("query_positions", torch.arange(n)).split(size, dim=-1)
    parts = [
        op(chunk, k, v, pattern, query_positions=at, backend=backend, **options)
        for chunk, at in zip(q.split(size, dim=2), places, strict=True)
    ]
    if options.get("return_lse"):
        return tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return torch.cat(parts, dim=2)


def outcome(run: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor, **options) -> dict[str, Tensor]:
    """out, lse and the gradients of every input, through out alone and through both, under fixed random cotangents.

    `run` takes q, k, v and then `sink_logits` (where a fourth input is given) and the options.
    """
    names = ("dq", "dk", "dv", "d_sink_logits")[: len(inputs)]
    leaves = [x.detach().requires_grad_() for x in inputs]
    sinks = {"sink_logits": leaves[3]} if len(leaves) > 3 else {}
    out, lse = run(*leaves[:3], **sinks, **options)
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    of_out = torch.autograd.grad(out, leaves, cotangents[0], retain_graph=True)
    of_both = torch.autograd.grad((out, lse), leaves, cotangents)
    gradients = {f"{name} of out": x for name, x in zip(names, of_out, strict=True)}
    gradients |= dict(zip(names, of_both, strict=True))
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], *, tolerance: float = 1e-10) -> None:
    """Equal to within `tolerance` of each tensor's size; what is infinite must be so in both, and nothing is NaN."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": False}
        torch.testing.assert_close(got[name], expected, **close, msg=lambda m, name=name: f"{name}: {m}")
