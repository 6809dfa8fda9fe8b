"""Attention inside one tile, forward and backward, by two engines with one interface.

Shapes: q [P, R, T, D], k [P, K, D], v [P, K, Dv], allowed bool [T, K] or None (all), out [P, R, T, Dv],
lse [P, R, T] natural log. The backward takes the final out and lse of each query, over all its passes, so that a
pass's share of the gradient needs nothing of the other passes. Gradients of k and v are summed over R.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Engine(Protocol):
    """Forward and backward of one tile."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). A row without allowed keys has output 0 and an lse that the caller must not use."""
        ...

    @staticmethod
    def backward(
        d_out: Tensor,
        d_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        allowed: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        ...


def choose_engine(device: torch.device, softcap: float | None, *, with_lse_gradient: bool = False) -> type[Engine]:
    """The fused one where it can do what is asked, else the one of plain products."""
    return _Products if device.type != "cpu" or softcap is not None or with_lse_gradient else _Fused


class _Fused:
    """PyTorch's flash attention for the CPU, called below `scaled_dot_product_attention` because it returns the lse."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        del softcap
        width = max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _widen(q, width),
            _share(_widen(k, width), q),
            _share(_widen(v, width), q),
            attn_mask=_additive(allowed, q.dtype),
            scale=scale,
        )
        return out[..., : v.shape[-1]], lse

    @staticmethod
    def backward(
        d_out: Tensor,
        d_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        allowed: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        del d_lse, softcap
        width = max(q.shape[-1], v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _widen(d_out, width),
            _widen(q, width),
            _share(_widen(k, width), q),
            _share(_widen(v, width), q),
            _widen(out, width),
            lse,
            0.0,
            False,
            attn_mask=_additive(allowed, q.dtype),
            scale=scale,
        )
        return dq[..., : q.shape[-1]], dk.sum(1)[..., : k.shape[-1]], dv.sum(1)[..., : v.shape[-1]]


def _widen(x: Tensor, width: int) -> Tensor:
    """Zero columns up to `width`: the fused kernel wants one head size, and zeros change no product."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _share(x: Tensor, q: Tensor) -> Tensor:
    """[P, K, D] seen as [P, R, K, D] without a copy."""
    return x[:, None].expand(-1, q.shape[1], -1, -1)


def _additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, -math.inf)


class _Products:
    """Plain products, on any device, with softcap and with a gradient of the lse."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        scores, _ = _scores(q, k, allowed, scale=scale, softcap=softcap)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights.flatten(1, 2), v).view(*q.shape[:-1], -1) / total.clamp(min=1.0)
        return out, (top + total.log())[..., 0]

    @staticmethod
    def backward(
        d_out: Tensor,
        d_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        allowed: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, capped = _scores(q, k, allowed, scale=scale, softcap=softcap)
        weights = (scores - lse[..., None]).exp_()
        of_lse = (d_out * out).sum(-1) if d_lse is None else (d_out * out).sum(-1) - d_lse
        d_out = d_out.flatten(1, 2)
        d_scores = torch.bmm(d_out, v.mT).view_as(weights).sub_(of_lse[..., None]).mul_(weights)
        if capped is not None and softcap is not None:
            d_scores *= 1 - (capped / softcap) ** 2
        d_scores = d_scores.mul_(scale).flatten(1, 2)
        dq = torch.bmm(d_scores, k).view_as(q)
        return dq, torch.bmm(d_scores.mT, q.flatten(1, 2)), torch.bmm(weights.flatten(1, 2).mT, d_out)


def _scores(
    q: Tensor, k: Tensor, allowed: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [P, R, T, K], -inf where not allowed, and the capped scores before masking where there is a cap."""
    scores = torch.bmm(q.flatten(1, 2), k.mT).view(*q.shape[:-1], -1).mul_(scale)
    capped = None
    if softcap is not None:
        scores = capped = scores.div_(softcap).tanh_().mul_(softcap)
    return (scores if allowed is None else scores.masked_fill(~allowed, -math.inf)), capped
