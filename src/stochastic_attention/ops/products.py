"""Attention of few queries by plain products over gathered keys: what the compiled kernels of few queries are to equal.

It is the code that differentiates, once or twice; the kernels have a forward only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .validation import can_read


@dataclass(frozen=True)
class Neighbours:
    """The keys of each query.

    Attributes:
        slot: int64 [B', H', Nq, C], the key in each column; the query's own where the column stays empty. None where
            columns are keys, so that all queries share them.
        allowed: bool [B', H', Nq, C], which columns hold a key.
        bias: compute dtype, broadcastable to the scores [B, H, Nq, C], or None.
    """

    slot: Tensor | None
    allowed: Tensor
    bias: Tensor | None


def attend(
    q: Tensor, k: Tensor, v: Tensor, found: Neighbours, *, dtype: torch.dtype, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in `dtype` over the keys that are `found`.

    Keys are held in sets: one a query, or one that all share. Inside, shapes are [B, Hkv, sets, T, ...] for T query
    rows a set (query heads of the group, and queries where they share), and [B, Hkv, sets, C, ...] for its keys.
    """
    heads, count, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    q = q.to(dtype).unflatten(1, (-1, group)).transpose(2, 3)  # [B, Hkv, Nq, R, D]
    allowed = found.allowed[:, :, :, None]
    bias = None if found.bias is None else found.bias[:, :, :, None]
    if found.slot is None:
        allowed = allowed.expand(-1, -1, -1, group, -1).flatten(2, 3)[:, :, None]
        q = q.flatten(2, 3)[:, :, None]
        k, v = k[:, :, None].to(dtype), v[:, :, None].to(dtype)
    else:
        k, v = (_rows(x, found.slot).to(dtype) for x in (k, v))

    q, bad_q = _without_bad_rows(q)
    k, bad_k = _without_bad_rows(k)
    v, bad_v = _without_bad_rows(v)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v / total).masked_fill(empty, 0.0)
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    for bad in (bad_q, None if bad_k is None else bad_k.mT, None if bad_v is None else bad_v.mT):
        if bad is not None:
            poisoned = (allowed & bad).any(-1, keepdim=True)
            out, lse = out.masked_fill(poisoned, math.nan), lse.masked_fill(poisoned, math.nan)

    def in_order(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], count, group, -1).transpose(2, 3).reshape(-1, heads, count, x.shape[-1])

    return in_order(out), in_order(lse)[..., 0]


def gradients(
    inputs: Sequence[Tensor],
    found: Neighbours,
    d_out: Tensor,
    d_lse: Tensor,
    wanted: Sequence[bool],
    *,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor | None, ...]:
    """Those of `attend` for the `inputs` q, k and v that are `wanted`; differentiable where gradients are enabled."""
    differentiable = torch.is_grad_enabled()  # a second derivative is wanted
    with torch.enable_grad(), torch.autocast(d_out.device.type, enabled=False):
        # Tensors of their own, as one tensor may be given for several; with the history only where it is needed.
        saved = (x.view_as(x) if differentiable else x.detach() for x in inputs)
        q, k, v = (
            x if differentiable or not want else x.requires_grad_() for x, want in zip(saved, wanted, strict=True)
        )
        # A key that several queries gather gets the sum of its gradients before they are rounded.
        results = attend(q, k.to(dtype), v.to(dtype), found, dtype=dtype, scale=scale, softcap=softcap)
        sources = [x for x, want in zip((q, k, v), wanted, strict=True) if want]
        # The lse does not depend on v, and so may have no gradient to pass on.
        passed = [(x, d) for x, d in zip(results, (d_out, d_lse), strict=True) if x.requires_grad]
        results, d_results = zip(*passed, strict=True)
        found_gradients = iter(torch.autograd.grad(results, sources, d_results, create_graph=differentiable))
    return tuple(next(found_gradients) if want else None for want in wanted)


def _rows(x: Tensor, slot: Tensor) -> Tensor:
    """Rows `slot` [B', H', Nq, C] of x [B, H, Nk, D]: [B, H, Nq, C, D]."""
    batch, heads, keys, width = x.shape
    slot = slot.expand(batch, heads, -1, -1)
    row = torch.arange(batch, device=x.device).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=x.device).view(-1, 1, 1)
    if x.is_contiguous():  # the common cache: the fastest way to read whole rows
        return F.embedding((row * heads + head) * keys + slot, x.view(-1, width))
    return x[row, head, slot]


def _without_bad_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with 0 for what is not finite, and which rows have such a value (bool, last dimension 1), None for no row.

    A masked key must be finite all the same: in the products 0 * NaN is NaN.
    """
    if can_read(x.device) and bool(x.detach().sum().isfinite()):
        return x, None
    bad = (x.detach() * 0).sum(-1, keepdim=True) != 0  # 0 * NaN and 0 * inf are NaN
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), bad
