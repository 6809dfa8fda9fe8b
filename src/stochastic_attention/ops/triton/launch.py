"""Run the kernels of a call, pass after pass: allocation, arguments, launches.

Nothing is read on the host here. So whether a row is not finite is decided on the device: each kernel is launched twice,
plain and `CHECKED`, and the one whose case it is not returns at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..plan import lower
from .schedule import CHUNK, Schedule, schedule, tiles
from .sizes import Kernel, choose, padded

_ROWS_OF_PREPARE = 32


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv] in v's dtype, lse [B, Hq, Nq] in the compute dtype), without a gradient.

    Rows that hold anything that is not finite, or see it, are NaN. The sink is left out.
    """
    from .forward import forward as kernel

    call = _with_dense_rows(call)
    schedules = _schedules(call)
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    out = call.v.new_zeros(shape, dtype=_sum_dtype(call, call.v, schedules))
    lse = call.v.new_full(shape[:-1], -math.inf, dtype=call.compute_dtype)
    bad = _Bad.of(call)
    for s in schedules:
        _launch(kernel, "forward", call, s, bad, {"out": out, "lse": lse}, FRESH=s.fresh)
    return out.to(call.v.dtype), lse


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in the dtypes of q, k and v, from what `forward` returned and the cotangents of both."""
    from . import backward as kernels

    call = _with_dense_rows(call)
    schedules = _schedules(call)
    d_out = _dense(d_out)
    delta, safe_lse = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.numel()
    if rows:
        kernels.prepare[(-(-rows // _ROWS_OF_PREPARE),)](
            out, d_out, lse, lse if d_lse is None else d_lse.contiguous(), delta, safe_lse,
            *d_out.stride()[:3], lse.shape[1], lse.shape[2], rows,
            DIM_V=out.shape[-1], BLOCK_DV=padded(out.shape[-1]), BLOCK_M=_ROWS_OF_PREPARE, LSE_GRADIENT=d_lse is not None,
        )  # fmt: skip
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=_sum_dtype(call, x, schedules), device=x.device) for x in (call.q, call.k, call.v)
    )
    bad = _Bad.of(call)
    given = {"d_out": d_out, "lse": safe_lse, "delta": delta}
    for first, s in zip((True, *(False,) * len(schedules)), schedules, strict=False):
        _launch(kernels.of_queries, "of_queries", call, s, bad, given | {"dq": dq}, FRESH=s.fresh)
        _launch(kernels.of_keys, "of_keys", call, s, bad, given | {"dk": dk, "dv": dv}, FIRST=first)
    return tuple(gradient.to(x.dtype) for gradient, x in ((dq, call.q), (dk, call.k), (dv, call.v)))


def _dense(x: Tensor) -> Tensor:
    """`x` itself where its rows are dense, as the kernels read them; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _with_dense_rows(call: Call) -> Call:
    return replace(call, q=_dense(call.q), k=_dense(call.k), v=_dense(call.v))


def _schedules(call: Call) -> list[Schedule]:
    if 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2]):
        return []
    return [schedule(call, p) for p in lower(call)]


def _sum_dtype(call: Call, x: Tensor, schedules: list[Schedule]) -> torch.dtype:
    """What results like `x` are kept in between passes: the compute dtype, unless there is nothing between."""
    return x.dtype if len(schedules) <= 1 else call.compute_dtype


@dataclass(frozen=True)
class _Bad:
    """Rows of q, and of k or v, that are not finite; and whether there are any: int32, [1]."""

    some: Tensor
    query: Tensor
    key: Tensor

    @classmethod
    def of(cls, call: Call) -> _Bad:
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
    bad: _Bad,
    results: dict[str, Tensor],
    **flags: bool,
) -> None:
    """One pass. `results` are named as the kernel's arguments; all but d_out are dense."""
    q, k, v = call.q, call.k, call.v
    sizes = choose(name, q.shape[-1], v.shape[-1], max(x.dtype.itemsize for x in (q, k, v)))
    t = tiles(s, sizes.block_m, sizes.block_n)
    of_keys = name == "of_keys"
    group, block = (s.query_group, sizes.block_m) if of_keys else (s.key_group, sizes.block_n)
    query_tiles, key_tiles = t.queries.shape[-1], t.keys.shape[-1]
    programs = q.shape[0] * (k.shape[1] * key_tiles if of_keys else q.shape[1] * query_tiles)
    if name == "of_keys":
        results = results | {"reach": t.reach}
    strided = {"q": q, "k": k, "v": v} | ({"g": results["d_out"]} if "d_out" in results else {})
    rule = s.rule
    nothing = s.start  # where an argument is not read
    arguments = {f"{x}_ptr": tensor for x, tensor in ({"q": q, "k": k, "v": v} | results).items()}
    arguments |= {f"{x}_{axis}": y.stride(i) for x, y in strided.items() for i, axis in enumerate("bhn")}
    for checked in (False, True):
        kernel[(programs,)](
            **arguments,
            query_rows_ptr=s.query_rows,
            start_ptr=s.start,
            stop_ptr=s.stop,
            query_position_ptr=s.query_position,
            bias_ptr=nothing if s.bias is None else s.bias,
            query_tiles_ptr=t.queries,
            key_rows_ptr=s.key_rows,
            key_slot_ptr=nothing if s.key_slot is None else s.key_slot,
            key_position_ptr=s.key_position,
            key_tiles_ptr=t.keys,
            any_bad_ptr=bad.some,
            bad_query_ptr=bad.query,
            bad_key_ptr=bad.key,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            queries=q.shape[2],
            keys=k.shape[2],
            order_rows=s.query_rows.shape[0],
            order_heads=s.query_rows.shape[1],
            key_order_rows=s.key_rows.shape[0],
            key_order_heads=s.key_rows.shape[1],
            slots=s.query_rows.shape[2],
            key_slots=s.key_rows.shape[2],
            query_tiles=query_tiles,
            key_tiles=key_tiles,
            local=0 if rule is None else rule.local if rule.causal else rule.local or -1,
            sinks=rule.sinks if rule else 0,
            scale=call.scale,
            softcap=call.softcap or 0.0,
            DIM=q.shape[-1],
            DIM_V=v.shape[-1],
            BLOCK_D=padded(q.shape[-1]),
            BLOCK_DV=padded(v.shape[-1]),
            BLOCK_M=sizes.block_m,
            BLOCK_N=sizes.block_n,
            CHUNK=group // block or CHUNK,
            SORTED=group > 0,
            RULE=0 if rule is None else 1 if rule.causal else 2,
            SOFTCAP=call.softcap is not None,
            BIAS=s.bias is not None,
            CHECKED=checked,
            PRECISION=_precision(call.q.device),
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            **flags,
        )


def _precision(device: torch.device) -> str:
    """What products of float32 are rounded to: as torch's own matrix products are told to."""
    allowed = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"
