"""The kernels as operators of PyTorch: opaque to compilers, and differentiable once.

An operator plans inside, from the documents and the pattern: sorting, and what is read on the host where there are
several documents, then neither breaks a compiled graph nor guards it. The backward plans again, or finds the plan kept:
see `plans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..layout import Layout
from ..pattern import Pattern
from . import launch

_COUNTS = ("local_window", "sinks", "seed", "block_size", "top_k", "stride", "random_blocks")


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq] in the compute dtype), without the sink; see `launch.dtype_of_out`."""
    return _forward(*_arguments(call))


def _arguments(call: Call) -> tuple[Any, ...]:
    """`call` in the types that operators take."""
    layout, pattern, step = call.layout, call.pattern, call.step
    return (
        call.q,
        call.k,
        call.v,
        layout.documents,
        None if layout.queries_are_keys else layout.query_token,
        step if isinstance(step, Tensor) else None,
        0 if isinstance(step, Tensor) else step,
        call.layer,
        pattern.kind,
        pattern.scope,
        pattern.shape,
        pattern.window,
        [getattr(pattern, name) for name in _COUNTS],
        float(pattern.correction),
        pattern.per_head,
        call.causal,
        float(call.scale),
        None if call.softcap is None else float(call.softcap),
    )


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    query_token: Tensor | None,
    step: Tensor | None,
    step_number: int,
    layer: int,
    kind: Any,  # noqa: ANN401 - checked by Pattern
    scope: Any,  # noqa: ANN401
    shape: Any,  # noqa: ANN401
    window: int | None,
    counts: Sequence[int],
    correction: float,
    per_head: bool,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> Call:
    """Undoes `_arguments`."""
    keys = k.shape[2]
    token = torch.arange(keys, device=k.device)[None] if query_token is None else query_token
    return Call(
        q=q,
        k=k,
        v=v,
        pattern=Pattern(
            kind,
            window=window,
            scope=scope,
            shape=shape,
            correction=correction,
            per_head=per_head,
            **dict(zip(_COUNTS, counts, strict=True)),
        ),
        layout=Layout(documents, token, keys, queries_are_keys=query_token is None),
        layer=layer,
        step=step_number if step is None else step,
        causal=causal,
        decode=False,
        scale=scale,
        softcap=softcap,
        sink_logits=None,
    )


@torch.library.custom_op("stochastic_attention::attend", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    query_token: Tensor | None,
    step: Tensor | None,
    step_number: int,
    layer: int,
    kind: str,
    scope: str,
    shape: str,
    window: int | None,
    counts: Sequence[int],
    correction: float,
    per_head: bool,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    call = _call(
        q, k, v, documents, query_token, step, step_number, layer, kind, scope, shape, window, counts, correction,
        per_head, causal, scale, softcap,
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        return launch.forward(call)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_facts: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype), torch.float32)
    out_dtype = launch.dtype_of_out(q, k, v)
    return v.new_empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype), q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op("stochastic_attention::attend_backward", mutates_args=())
def _backward(
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    query_token: Tensor | None,
    step: Tensor | None,
    step_number: int,
    layer: int,
    kind: str,
    scope: str,
    shape: str,
    window: int | None,
    counts: Sequence[int],
    correction: float,
    per_head: bool,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(
        q, k, v, documents, query_token, step, step_number, layer, kind, scope, shape, window, counts, correction,
        per_head, causal, scale, softcap,
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        return launch.backward(call, out, lse, d_out, d_lse)


@_backward.register_fake
def _(
    _out: Tensor, _lse: Tensor, _d_out: Tensor, _d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_facts: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - no public type
    tensors, ctx.facts = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    out, lse, *tensors = ctx.saved_tensors
    none = (None,) * (3 + len(ctx.facts))
    if d_out is None and d_lse is None:
        return None, None, None, *none
    d_out = torch.zeros_like(out) if d_out is None else d_out
    return *_backward(out, lse, d_out, d_lse, *tensors, *ctx.facts), *none


def _refuse_second_derivative(_ctx: object, *_gradients: object) -> None:
    raise RuntimeError('backend "triton" has no second derivative; backend="reference" has')


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)
torch.library.register_autograd(_backward, _refuse_second_derivative)
