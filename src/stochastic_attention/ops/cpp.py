"""Linear-cost attention by a compiled kernel, forward and backward, on the CPU: csrc/attention.cpp.

It takes the same passes as `blocked` (see `plan`) and cuts them into tiles itself. float32 and float64 inputs are read
where they lie, whatever the strides of B, H and N; so is bfloat16, which is widened in registers. All sums are in the
call's compute dtype.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from . import native
from .call import Call
from .merge import attend_finite
from .once import differentiable_once
from .plan import Pass, lower

_MOST_ROWS = 2**31 - 1  # the kernel counts rows and slots in 32 bits
# Heads, or parts of them, whose gradients of keys are summed side by side. Independent of the number of threads, so
# that sums are too; few heads are split at the price of that many copies of dk and dv.
_SUMS_AT_ONCE = 8


def unsupported(call: Call) -> str | None:
    """Whole sequences on a CPU, where the kernel can be built."""
    if call.permutes_each_prefix:
        return 'decode=True with scope "sequence" gives every query a permutation of its own, and passes share one'
    if call.q.device.type != "cpu":
        return f"on the CPU only, got {call.q.device}"
    if max(call.q.shape[2], call.k.shape[2]) > _MOST_ROWS:
        return f"at most {_MOST_ROWS} queries and keys"
    return _why_not_built()


@torch.compiler.assume_constant_result
def _why_not_built() -> str | None:
    return native.why_not_built()


@torch.compiler.disable(reason="tiles are cut on the host; a graph break here gives eager's result")
def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in the call's compute dtype; the sink is outside the lse."""
    nothing = 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2])
    passes = [] if nothing else lower(call)
    dtype = call.compute_dtype
    q, k, v = (native.readable(x, dtype) for x in (call.q, call.k, call.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Compiled.apply(q, k, v, passes, dtype, call.scale, call.softcap)

    return attend_finite(attend, q, k, v, call.sink_logits)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context has no public type
        q: Tensor,
        k: Tensor,
        v: Tensor,
        passes: list[Pass],
        dtype: torch.dtype,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)
        for p in passes:
            _call_kernel("forward", q, k, v, p, scale, softcap, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.passes, ctx.scale, ctx.softcap = passes, scale, softcap
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("cpp")
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the signature
        ctx: Any,  # noqa: ANN401
        d_out: Tensor | None,
        d_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 7
        with torch.autocast("cpu", enabled=False):
            return (*_backward(ctx, d_out, d_lse), None, None, None, None)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ANN401
    q, k, v, out, lse = ctx.saved_tensors
    # An empty row takes and gives no gradient, whatever comes from above; lse = inf makes its weights 0.
    empty = lse == -math.inf
    d_out = torch.zeros_like(out) if d_out is None else d_out.masked_fill(empty[..., None], 0.0).contiguous()
    delta = (d_out * out).sum(-1)
    if d_lse is not None:
        delta -= d_lse.masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty, math.inf)
    splits = max(1, _SUMS_AT_ONCE // max(1, k.shape[0] * k.shape[1]))
    dq = out.new_zeros(q.shape)
    dk, dv = (out.new_zeros(splits, *x.shape) for x in (k, v))
    for p in ctx.passes:
        _call_kernel(
            "backward", q, k, v, p, ctx.scale, ctx.softcap,
            lse=lse, d_out=d_out, delta=delta, dq=dq, dk=dk, dv=dv, splits=splits,
        )  # fmt: skip
    dk, dv = (x[0] if splits == 1 else x.sum(0) for x in (dk, dv))
    return tuple(gradient.to(x.dtype) for gradient, x in ((dq, q), (dk, k), (dv, v)))


_SIZES = (
    *("size", "threads", "splits"),
    *("batch", "kv_heads", "group", "queries", "keys", "dim", "dim_v"),
    *("order_rows", "order_heads", "key_order_rows", "key_order_heads", "slots", "key_slots"),
    *("has_rule", "causal", "local", "sinks", "fresh"),
)
_ORDERS = ("query_rows", "key_rows", "start", "stop", "query_position", "key_position", "bias")
_RESULTS = ("out", "lse", "d_out", "delta", "dq", "dk", "dv")


class _Arguments(ctypes.Structure):
    """Mirrors `Arguments` in csrc/attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, native.Operand) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in _ORDERS),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in _RESULTS),
    ]


def _call_kernel(
    direction: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Pass,
    scale: float,
    softcap: float | None,
    *,
    splits: int = 1,
    **results: Tensor,
) -> None:
    """One pass of `direction`. `results` are dense tensors of the compute dtype by name, read or added to in place."""
    dtype = results["lse"].dtype
    orders = {name: getattr(p, name) for name in _ORDERS if getattr(p, name) is not None}
    orders = {name: x.contiguous() for name, x in orders.items()}  # held here for as long as the kernel reads them
    for name, x in orders.items():
        assert x.shape == (p.key_rows if name.startswith("key") else p.query_rows).shape
        assert x.dtype == (torch.int64 if name.endswith("rows") else dtype if name == "bias" else torch.int32)
    assert all(x.dtype == dtype and x.is_contiguous() for x in results.values())
    pointers: dict[str, Any] = {name: x.data_ptr() for name, x in (orders | results).items()}
    rule = p.rule
    arguments = _Arguments(
        size=ctypes.sizeof(_Arguments),
        threads=torch.get_num_threads(),
        splits=splits,
        order_rows=p.query_rows.shape[0],
        order_heads=p.query_rows.shape[1],
        key_order_rows=p.key_rows.shape[0],
        key_order_heads=p.key_rows.shape[1],
        slots=p.query_rows.shape[2],
        key_slots=p.key_rows.shape[2],
        has_rule=rule is not None,
        causal=rule is not None and rule.causal,
        local=rule.local if rule else 0,
        sinks=rule.sinks if rule else 0,
        fresh=p.fresh,
        q=native.Operand.of(q),
        k=native.Operand.of(k),
        v=native.Operand.of(v),
        scale=scale,
        softcap=softcap or 0.0,
        **native.sizes(q, k, v),
        **pointers,
    )
    native.call(direction, dtype, arguments)
