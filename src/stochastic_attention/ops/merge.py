"""What surrounds a softmax over N(i), shared by the backends: the sink logit, and non-finite inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def apply_sink(out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Let one more logit a head share the softmax: out * exp(lse) / (exp(lse) + exp(sink)).

    `out` [B, H, N, Dv] and its natural-log `lse` [B, H, N], the sink [H] not in it. Rows without keys stay 0.
    """
    sink = sink_logits.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0.0)
    return out * kept[..., None]


def attend_finite(attend: Attend, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """`attend(q, k, v)` and the sink, with non-finite inputs confined to the rows that see them, which become NaN.

    In a product, 0 * NaN would carry a masked key's NaN into every row of its tile. So where anything is not finite,
    zeros are attended to in its place, and a second call over equal scores finds the rows that see a bad key.
    """
    if all(bool(x.detach().sum().isfinite()) for x in (q, k, v)):
        return _attend_with_sink(attend, q, k, v, sink_logits)
    bad_q, bad_k, bad_v = (~x.detach().isfinite().all(-1, keepdim=True) for x in (q, k, v))
    q, k, v = (x.masked_fill(bad, 0.0) for x, bad in ((q, bad_q), (k, bad_k), (v, bad_v)))
    out, lse = _attend_with_sink(attend, q, k, v, sink_logits)
    with torch.no_grad():
        share_of_bad, _ = attend(torch.zeros_like(q), torch.zeros_like(k), (bad_k | bad_v).to(v.dtype))
        poisoned = ((share_of_bad > 0) | bad_q)[..., 0] & (lse > -math.inf)
    return out.masked_fill(poisoned[..., None], math.nan), lse.masked_fill(poisoned, math.nan)


def _attend_with_sink(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v)
    return (out if sink_logits is None else apply_sink(out, lse, sink_logits)), lse
