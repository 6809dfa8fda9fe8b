"""Attention of few queries on a CUDA device, by the kernels of `decode`, as operators of PyTorch.

As an operator it is opaque to compilers, so that graphs stay whole; nothing is read on the host, so that CUDA graphs
can hold it. The backward is that of `products`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import products
from ..pattern import Pattern
from ..products import Neighbours
from .decode import IS_INTERPRETED, attend_part, find_columns, merge_parts
from .sizes import padded

_COLUMNS_OF_PART = 64  # the least work that is worth a program
_MOST_PARTS = 128  # what merging them reads at once
_COLUMNS_AT_ONCE = 128  # that are looked up
_ROWS = 16  # of a program: the least that matrix units take


def attend(
    q: Tensor, k: Tensor, v: Tensor, found: Neighbours, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in float32; differentiable.

    A non-finite query, or key or value that it sees, makes its row NaN; a query that sees none has out 0 and lse -inf.
    """
    return attend_few(q, k, v, found.slot, found.allowed, found.bias, scale, softcap)


def find(token: Tensor, table: Tensor | None, pattern: Pattern, *, levels: int, heads: int, keys: int) -> Neighbours:
    """What `gather.neighbours` finds for queries at `token` [B', Nq] of one document, local or of scope "prefix".

    A query that stands at none of the `keys` gets a row of NaN. `table` and its `levels` are those of `rank_tables`,
    None for a local window; `heads` share it.
    """
    span = pattern.reach if table is None else pattern.local_window
    sampled = 0 if table is None else 2 * pattern.reach - (pattern.shape == "sliding")
    reach = 1 if table is None else pattern.reach
    sizes = [span + pattern.sinks + sampled, reach, span, pattern.sinks]
    slot, allowed, bias = find_few(
        token, table, sizes, levels, heads, keys, pattern.shape == "block", pattern.correction
    )
    return Neighbours(slot, allowed, bias if pattern.correction else None)


@torch.library.custom_op("stochastic_attention::find_few", mutates_args=())
def find_few(
    token: Tensor,
    table: Tensor | None,
    sizes: list[int],
    levels: int,
    heads: int,
    keys: int,
    in_blocks: bool,
    correction: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`find`; `sizes` are the columns and the pattern's window, local window and sinks."""
    slot, allowed, bias = _empty_columns(token, sizes, heads, correction)
    batch, _, queries, columns = slot.shape
    halves = (0, 0) if table is None else table.stride()[:2]
    arguments = {
        "token": token,
        "table": table,
        "slot": slot,
        "allowed": allowed.view(torch.uint8),
        "bias": bias,
        "token_batch": token.stride(0),
        "token_query": token.stride(1),
        "table_half": halves[0],
        "table_head": halves[1],
        "heads": heads,
        "queries": queries,
        "keys": keys,
        **dict(zip(("columns", "window", "span", "sinks"), sizes, strict=True)),
        "correction": correction,
        "RANDOM": table is not None,
        "IN_BLOCKS": in_blocks,
        "HAS_BIAS": correction > 0,
        "LEVELS": levels,
        "BLOCK_C": _COLUMNS_AT_ONCE,
        "enable_fp_fusion": True,
    }
    with torch.cuda.device_of(token):
        find_columns[(-(-columns // _COLUMNS_AT_ONCE), batch * heads * queries)](**arguments)
    return slot, allowed, bias


@find_few.register_fake
def _(
    token: Tensor,
    table: Tensor | None,
    sizes: list[int],
    levels: int,
    heads: int,
    keys: int,
    in_blocks: bool,
    correction: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del table, levels, keys, in_blocks
    return _empty_columns(token, sizes, heads, correction)


def _empty_columns(token: Tensor, sizes: list[int], heads: int, correction: float) -> tuple[Tensor, Tensor, Tensor]:
    shape = (token.shape[0], heads, token.shape[1], sizes[0])
    slot = torch.empty(shape, dtype=torch.int64, device=token.device)
    allowed = torch.empty(shape, dtype=torch.bool, device=token.device)
    return slot, allowed, torch.empty(shape if correction else 0, dtype=torch.float32, device=token.device)


@torch.library.custom_op("stochastic_attention::attend_few", mutates_args=())
def attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot: Tensor | None,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend`, its `found` spelled out."""
    (batch, heads, queries), dim_v = q.shape[:3], v.shape[-1]
    grid, arguments = part_arguments(q, k, v, slot, allowed, bias, scale, softcap)
    out = torch.empty(batch, heads, queries, dim_v, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    merging = {
        "part_out": arguments["part_out"],
        "part_lse": arguments["part_lse"],
        "out": out,
        "lse": lse,
        "parts": grid[2],
        "DIM_V": dim_v,
        "BLOCK_P": padded(grid[2]),
        "BLOCK_V": min(64, padded(dim_v)),
        "enable_fp_fusion": True,
    }
    with torch.cuda.device_of(q):
        attend_part[grid](**arguments)
        merge_parts[(lse.numel(),)](**merging)
    return out, lse


def part_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot: Tensor | None,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """What `attend_part` is launched with: its grid, the parts last, and its arguments by name."""
    batch, kv_heads, keys, dim = k.shape
    heads, queries, dim_v, columns = q.shape[1], q.shape[2], v.shape[-1], allowed.shape[-1]
    group = heads // kv_heads
    allowed = (allowed if slot is None else allowed.expand_as(slot)).contiguous()
    order_batch, order_head = (x if n > 1 else 0 for n, x in zip(allowed.shape, allowed.stride()[:2], strict=False))

    in_float32 = not (q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2)
    if IS_INTERPRETED:  # it would multiply the bits of bfloat16 as integers
        in_float32 |= q.dtype == torch.bfloat16
    block_d, block_v = padded(dim), padded(dim_v)
    block_c = 32 if max(block_d, block_v) <= (64 if in_float32 else 128) else 16
    parts = min(_MOST_PARTS, -(-columns // _COLUMNS_OF_PART))
    columns_of_part = -(-columns // (parts * block_c)) * block_c
    parts = -(-columns // columns_of_part)
    rows, sets = (group * queries, 1) if slot is None else (group, queries)
    strides = {
        f"{name}_{axis}": stride
        for name, x in (("q", q), ("k", k), ("v", v))
        for axis, stride in zip(("batch", "head", "row", "dim"), x.stride(), strict=True)
    }
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "slot": None if slot is None else slot.contiguous(),
        "allowed": allowed.view(torch.uint8),
        "bias": None if bias is None else bias.to(torch.float32).expand_as(allowed).contiguous(),
        "part_out": torch.empty(batch, heads, queries, parts, dim_v, dtype=torch.float32, device=q.device),
        "part_lse": torch.empty(batch, heads, queries, parts, dtype=torch.float32, device=q.device),
        **strides,
        "order_batch": order_batch,
        "order_head": order_head,
        "kv_heads": kv_heads,
        "queries": queries,
        "keys": keys,
        "columns": columns,
        "columns_of_part": columns_of_part,
        "scale": scale,
        "softcap": softcap or 1.0,
        "GROUP": group,
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK_T": _ROWS,
        "BLOCK_C": block_c,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "SHARED": slot is None,
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": softcap is not None,
        "IN_FLOAT32": in_float32,
        "num_stages": 2 if in_float32 else 3,
        "enable_fp_fusion": True,
    }
    return (sets * -(-rows // _ROWS), batch * kv_heads, parts), arguments


@attend_few.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    del k
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    del output
    q, k, v, slot, allowed, bias, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, slot, allowed, bias)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    q, k, v, slot, allowed, bias = ctx.saved_tensors
    options = {"dtype": torch.float32, "scale": ctx.scale, "softcap": ctx.softcap}
    wanted = ctx.needs_input_grad[:3]
    found = Neighbours(slot, allowed, bias)
    return (*products.gradients((q, k, v), found, d_out, d_lse, wanted, **options), *(None,) * 5)


attend_few.register_autograd(_backward, setup_context=_save)
