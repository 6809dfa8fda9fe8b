"""Attention of few queries, each over its own gathered keys, by a compiled kernel: csrc/few_queries.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import native
from .products import Neighbours
from .validation import can_read

_SIZES = (
    *("size", "threads"),
    *("batch", "kv_heads", "group", "queries", "keys", "dim", "dim_v"),
    *("slot_rows", "slot_heads", "columns"),
)


class _Arguments(ctypes.Structure):
    """Mirrors `FewArguments` in csrc/few_queries.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, native.Operand) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("slot", "allowed", "bias")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
    ]


def can_attend(k: Tensor, v: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel may take these: eager code on a CPU where it is built, no copy of all keys."""
    if not can_read(k.device):
        return False
    return all(native.can_read_as_is(x, dtype) for x in (k, v)) and native.why_not_built() is None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Neighbours,
    *,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in `dtype`, without a gradient.

    Queries must not share their keys. A non-finite query, or key or value that it sees, makes its row NaN; a query that
    sees none has out 0 and lse -inf.
    """
    assert found.slot is not None
    q, k, v = (native.readable(x, dtype) for x in (q, k, v))
    slot = found.slot.contiguous()
    allowed = found.allowed.expand_as(slot).contiguous()
    bias = None if found.bias is None else found.bias.to(dtype).expand_as(slot).contiguous()
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    tensors = {"slot": slot, "allowed": allowed, "bias": bias, "out": out, "lse": lse}
    pointers: dict[str, Any] = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    arguments = _Arguments(
        size=ctypes.sizeof(_Arguments),
        threads=torch.get_num_threads(),
        slot_rows=slot.shape[0],
        slot_heads=slot.shape[1],
        columns=slot.shape[3],
        q=native.Operand.of(q),
        k=native.Operand.of(k),
        v=native.Operand.of(v),
        scale=scale,
        softcap=softcap or 0.0,
        **native.sizes(q, k, v),
        **pointers,
    )
    native.call("few", dtype, arguments)
    return out, lse
