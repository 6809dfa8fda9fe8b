"""What surrounds a softmax over N(i), shared by the backends: the sink logit, and non-finite inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def apply_sink(out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Let one more logit a head share the softmax: out * exp(lse) / (exp(lse) + exp(sink)).

    `out` [B, H, N, Dv] and its natural-log `lse` [B, H, N], the sink [H] not in it. Rows without keys stay 0.
    """
    sink = sink_logits.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0.0)
    return out * kept[..., None]


def poison(
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`attend(q, k, v)` with non-finite inputs confined to the rows that see them, which become NaN.

    In a product, 0 * NaN would carry a masked key's NaN into every row of its tile. So where anything is not finite,
    zeros are attended to instead, and one more value column counts how much of each row's weight lies on bad keys.
    """
    if all(bool(x.detach().sum().isfinite()) for x in (q, k, v)):
        return attend(q, k, v)
    good_q, good_k, good_v = (x.isfinite().all(-1, keepdim=True) for x in (q, k, v))
    good = good_k & good_v
    q, k, v = q.where(good_q, 0.0), k.where(good, 0.0), v.where(good, 0.0)
    out, lse = attend(q, k, torch.cat([v, (~good).to(v.dtype)], dim=-1))
    poisoned = ((out[..., -1] > 0) | ~good_q[..., 0]) & (lse > -math.inf)
    return out[..., :-1].masked_fill(poisoned[..., None], math.nan), lse.masked_fill(poisoned, math.nan)
