"""The one public op: check, choose a backend, call it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from .backends import choose
from .call import Call, check_tensors
from .layout import make_layout
from .pattern import Pattern
from .validation import check_flag


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    layer: int = ...,
    step: int | Tensor = ...,
    causal: bool = ...,
    decode: bool = ...,
    query_positions: Tensor | None = ...,
    documents: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    layer: int = ...,
    step: int | Tensor = ...,
    causal: bool = ...,
    decode: bool = ...,
    query_positions: Tensor | None = ...,
    documents: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    layer: int = 0,
    step: int | Tensor = 0,
    causal: bool = True,
    decode: bool = False,
    query_positions: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention of each query over the keys that `pattern` gives it.

        out_i = sum_{j in N(i)} softmax_j(scale * q_i . k_j) v_j

    A query whose N(i) is empty (padding) gets output 0 and gradient 0. A key outside N(i) contributes nothing, even if
    it is NaN or Inf; a non-finite q_i, or a non-finite key or value inside N(i), makes row i NaN.

    Args:
        q: [B, Hq, Nq, D], float64, float32, bfloat16 or float16, any strides, already rotated by its original position.
        k: [B, Hkv, Nk, D], Hkv divides Hq; consecutive query heads share a key/value head.
        v: [B, Hkv, Nk, Dv]. Dtypes may be mixed; the output has v's.
        pattern: which keys a query sees. See `Pattern`.
        layer, step: counters that feed the routing keys: pass the layer's index, and in training the optimizer step
            (a 0-d int64 tensor keeps compiled code from specialising on it).
        causal: only keys at or before the query, in original order.
        decode: each query is taken as the newest token of its document. Scope "sequence" then permutes the query's own
            prefix of position + 1 tokens, not the whole document, so that a chunk of new tokens gives each the N(i) and
            the output that it gets when tokens are added one by one: the last row of the op on its prefix. Nothing
            else changes. Needs causal=True.
        query_positions: integer [Nq] or [B, Nq], the index on the key axis that each query stands at. Needed where
            Nq != Nk; without it query i is key i.
        documents: integer [B, Nk]. Equal ids in a row are one document, -1 is padding (unwritten cache rows too). No
            query sees another document, and positions, ranks and lengths are counted inside the own one. Built by
            `documents_from_mask`, `documents_from_cu_seqlens`, `documents_from_position_ids`.
        scale: factor of the scores, by default D ** -0.5.
        softcap: scores become softcap * tanh(score / softcap), before any bias (Gemma 2).
        sink_logits: floating [Hq], a logit a head that joins the softmax without a value (gpt-oss).
        backend: a name from `backend_names()`; None takes the first that supports the call. A named backend that does
            not raises ValueError; it is never replaced.
        return_lse: also return log(sum_{j in N(i)} exp(score_ij)), natural log, the sink not included, -inf for an
            empty row: what merging partial results needs. Differentiable.

    Returns:
        out [B, Hq, Nq, Dv] in v's dtype, and with return_lse also lse [B, Hq, Nq] (float64 for float64 inputs, else
        float32: the dtype that all sums are accumulated in).

    Raises:
        ValueError: an argument is out of its domain; the message names it, what was expected and what came.
        RuntimeError: a second derivative is asked of a backend that has none; "gather" and "reference" have.
    """
    check_tensors(q, k, v)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    check_flag("return_lse", return_lse)
    layout = make_layout(
        documents, query_positions, batch=k.shape[0], queries=q.shape[2], keys=k.shape[2], device=k.device
    )
    call = Call.checked(
        q,
        k,
        v,
        pattern,
        layout=layout,
        layer=layer,
        step=step,
        causal=causal,
        decode=decode,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    run = choose(call, backend)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = run(call)
    out = out.to(v.dtype)
    return (out, lse) if return_lse else out
