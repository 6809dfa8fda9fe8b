"""Run the kernels of a call, pass after pass: allocation, arguments, launches.

Nothing is read on the host here. Whether any row is not finite is decided on the device: each kernel is launched twice,
plain and `CHECKED`, and the one whose case it is not returns at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from .plans import schedules
from .schedule import CHUNK, Schedule
from .sizes import Kernel, Sizes, choose, padded

_ROWS_OF_PREPARE = 32


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv] as `dtype_of_out` says, lse [B, Hq, Nq] in the compute dtype), without a gradient.

    Rows that hold anything that is not finite, or see it, are NaN. The sink is left out.
    """
    from .forward import forward as kernel

    call = _with_dense_rows(call)
    passes = schedules(call)
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    dtype = dtype_of_out(call.q, call.k, call.v)
    out = call.v.new_zeros(shape, dtype=dtype if len(passes) <= 1 else call.compute_dtype)
    lse = call.v.new_full(shape[:-1], -math.inf, dtype=call.compute_dtype)
    bad = Bad.of(call)
    for s in passes:
        _launch(kernel, "forward", call, s, bad, {"out": out, "lse": lse}, FRESH=s.fresh)
    return out.to(dtype), lse


def dtype_of_out(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """v's where all agree, else the compute dtype: the backward reads out, and may have gradients of more precision."""
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return v.dtype if q.dtype == k.dtype == v.dtype else torch.promote_types(widest, torch.float32)


def backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtypes of q, k and v, from what `forward` returned and the cotangents of both."""
    from . import backward as kernels

    call = _with_dense_rows(call)
    passes = schedules(call)
    d_out = _dense(d_out)
    delta, safe_lse = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.numel()
    if rows:
        prepare: Any = kernels.prepare
        prepare[(-(-rows // _ROWS_OF_PREPARE),)](
            out_ptr=out,
            d_out_ptr=d_out,
            lse_ptr=lse,
            d_lse_ptr=lse if d_lse is None else d_lse.contiguous(),
            delta_ptr=delta,
            safe_lse_ptr=safe_lse,
            g_b=d_out.stride(0),
            g_h=d_out.stride(1),
            g_n=d_out.stride(2),
            heads=lse.shape[1],
            queries=lse.shape[2],
            rows=rows,
            DIM_V=out.shape[-1],
            BLOCK_DV=padded(out.shape[-1]),
            BLOCK_M=_ROWS_OF_PREPARE,
            LSE_GRADIENT=d_lse is not None,
        )
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=_sum_dtype(call, x, passes), device=x.device) for x in (call.q, call.k, call.v)
    )
    bad = Bad.of(call)
    given = {"d_out": d_out, "lse": safe_lse, "delta": delta}
    for first, s in zip((True, *(False,) * len(passes)), passes, strict=False):
        _launch(kernels.of_queries, "of_queries", call, s, bad, given | {"dq": dq}, FRESH=s.fresh)
        _launch(kernels.of_keys, "of_keys", call, s, bad, given | {"dk": dk, "dv": dv}, FIRST=first)
    return dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)


def _dense(x: Tensor) -> Tensor:
    """`x` itself where its rows are dense, as the kernels read them; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _with_dense_rows(call: Call) -> Call:
    return replace(call, q=_dense(call.q), k=_dense(call.k), v=_dense(call.v))


def _sum_dtype(call: Call, x: Tensor, passes: list[Schedule]) -> torch.dtype:
    """What results like `x` are kept in between passes: the compute dtype, unless there is nothing between."""
    alone = (
        len(passes) <= 1 and call.compute_dtype != torch.float64
    )  # which the interpreter does not narrow to bfloat16
    return x.dtype if alone else call.compute_dtype


@dataclass(frozen=True)
class Bad:
    """Rows of q, and of k or v, that are not finite; and whether there are any: int32, [1]."""

    some: Tensor
    query: Tensor
    key: Tensor

    @classmethod
    def of(cls, call: Call) -> Bad:
        """Of the inputs of a call."""
        # The greatest magnitude of a row is finite where all of it is, cannot overflow, and is found in one reading.
        query, key, value = (
            torch.linalg.vector_norm(x, math.inf, dim=-1).isfinite().logical_not_() for x in (call.q, call.k, call.v)
        )
        key |= value
        return cls(torch.stack([query.any(), key.any()]).any().to(torch.int32)[None], query, key)


def _launch(
    kernel: Any,  # noqa: ANN401 - a compiled function or an interpreted one
    name: Kernel,
    call: Call,
    s: Schedule,
    bad: Bad,
    results: dict[str, Tensor],
    **flags: bool,
) -> None:
    """One pass."""
    q = call.q
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    itemsize = max(x.dtype.itemsize for x in (q, call.k, call.v))
    sizes = choose(name, q.shape[-1], call.v.shape[-1], itemsize, capability)
    programs, arguments = launch_arguments(name, sizes, call, s, bad, results)
    for checked in (False, True):
        kernel[(programs,)](**arguments, **flags, CHECKED=checked)


def launch_arguments(
    name: Kernel, sizes: Sizes, call: Call, s: Schedule, bad: Bad, results: dict[str, Tensor]
) -> tuple[int, dict[str, Any]]:
    """Programs, and the arguments of a kernel but for its flags.

    `results` go by the kernel's names; all but d_out are dense.
    """
    q, k, v = call.q, call.k, call.v
    of_keys = name == "of_keys"
    t = s.tiles(sizes.block_m, sizes.block_n)
    query_tiles, key_tiles = t.queries.shape[-1], t.keys.shape[-1]
    programs = q.shape[0] * (k.shape[1] * key_tiles if of_keys else q.shape[1] * query_tiles)
    rule = s.rule
    pointers = {
        **{"q": q, "k": k, "v": v, **results},
        "query_rows": s.query_rows,
        "start": s.start,
        "stop": s.stop,
        "query_position": s.query_position,
        "bias": s.start if s.bias is None else s.bias,  # what is not read must still be a pointer
        "query_tiles": t.queries,
        "key_rows": s.key_rows,
        "key_slot": s.key_rows if s.key_slot is None else s.key_slot,
        "key_position": s.key_position,
        "key_tiles": t.keys,
        **({"reach": t.reach} if of_keys else {}),
        "any_bad": bad.some,
        "bad_query": bad.query,
        "bad_key": bad.key,
    }
    strided = {"q": q, "k": k, "v": v} | ({"g": results["d_out"]} if "d_out" in results else {})
    return programs, {
        **{f"{what}_ptr": x for what, x in pointers.items()},
        **{f"{what}_{axis}": x.stride(i) for what, x in strided.items() for i, axis in enumerate("bhn")},
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "queries": q.shape[2],
        "keys": k.shape[2],
        "order_rows": s.query_rows.shape[0],
        "order_heads": s.query_rows.shape[1],
        "key_order_rows": s.key_rows.shape[0],
        "key_order_heads": s.key_rows.shape[1],
        "slots": s.query_rows.shape[2],
        "key_slots": s.key_rows.shape[2],
        "query_tiles": query_tiles,
        "key_tiles": key_tiles,
        "local": 0 if rule is None else rule.local if rule.causal else rule.local or -1,
        "sinks": rule.sinks if rule else 0,
        "scale": call.scale,
        "softcap": call.softcap or 0.0,
        "DIM": q.shape[-1],
        "DIM_V": v.shape[-1],
        "BLOCK_D": padded(q.shape[-1]),
        "BLOCK_DV": padded(v.shape[-1]),
        "BLOCK_M": sizes.block_m,
        "BLOCK_N": sizes.block_n,
        "CHUNK": s.group // (sizes.block_m if of_keys else sizes.block_n) or CHUNK,
        "SORTED": s.group > 0,
        "RULE": 0 if rule is None else 1 if rule.causal else 2,
        "SOFTCAP": call.softcap is not None,
        "BIAS": s.bias is not None,
        "WIDE": not q.is_cuda,  # the interpreter has no product of bfloat16
        "PRECISION": _precision(q.device),
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
        "enable_fp_fusion": True,
    }


def _precision(device: torch.device) -> str:
    """What products of float32 are rounded to: as torch's own matrix products are told to."""
    allowed = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"
