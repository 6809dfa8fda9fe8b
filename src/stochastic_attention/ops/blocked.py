"""Linear-cost attention in pure PyTorch, forward and backward, on any device.

A pass (see `plan`) is walked tile by tile: gather a tile's queries, take the slice of the sorted keys that it needs,
and attend exactly. Results of several passes over the same query are merged by log-sum-exp as they are written, so
that nothing larger than the inputs and one tile is ever held. The backward recomputes each tile from the final
log-sum-exp. On the CPU a tile is PyTorch's own fused attention; elsewhere, and under a softcap, plain products.

Shapes: P = batch rows x key/value heads that share an order, R = query heads a key/value head, T x K a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .merge import attend_finite
from .once import differentiable_once
from .plan import Pass, lower
from .tile_attention import choose_engine
from .tiles import Group, groups, tiles


def unsupported(call: Call) -> str | None:
    """Passes share one order among many queries; all else is supported."""
    if call.permutes_each_prefix:
        return 'decode=True with scope "sequence" gives every query a permutation of its own, and passes share one'
    return None


@torch.compiler.disable(reason="tiles are cut on the host; a graph break here gives eager's result")
def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in the call's compute dtype; the sink is outside the lse."""
    nothing = 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2])
    passes = [] if nothing else lower(call)
    q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _Blocked.apply(q, k, v, passes, call.scale, call.softcap)

    return attend_finite(attend, q, k, v, call.sink_logits)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context has no public type
        q: Tensor,
        k: Tensor,
        v: Tensor,
        passes: list[Pass],
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        engine = choose_engine(q.device, softcap)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], -math.inf)
        for p in passes:
            for group in groups(p, k.shape[1]):
                view = _View(group, k.shape[1])
                q_rows, out_rows, lse_rows = (view.of_queries(x) for x in (q, out, lse))
                k_sorted, v_sorted = (_gather(view.of_keys(x), group.key_rows) for x in (k, v))
                for tile in tiles(p, group):
                    rows = group.rows[tile.queries]
                    part, part_lse = engine.forward(
                        q_rows.index_select(2, rows),
                        k_sorted[:, tile.keys],
                        v_sorted[:, tile.keys],
                        tile.allowed,
                        scale=scale,
                        softcap=softcap,
                    )
                    if p.rule is not None and p.rule.leaves_rows_empty and tile.allowed is not None:
                        part_lse = part_lse.masked_fill(~tile.allowed.any(-1), -math.inf)
                    if group.bias is not None:
                        part_lse = part_lse + group.bias[tile.queries]
                    if not p.fresh:
                        part, part_lse = _merge(
                            out_rows.index_select(2, rows), lse_rows.index_select(2, rows), part, part_lse
                        )
                    out_rows.index_copy_(2, rows, part)
                    lse_rows.index_copy_(2, rows, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.passes, ctx.scale, ctx.softcap = passes, scale, softcap
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("blocked")
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the signature
        ctx: Any,  # noqa: ANN401
        d_out: Tensor | None,
        d_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        given = d_lse if d_out is None else d_out
        if given is None:
            return (None,) * 6
        with torch.autocast(given.device.type, enabled=False):
            return (*_backward(ctx, d_out, d_lse), None, None, None)


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    q, k, v, out, lse = ctx.saved_tensors
    engine = choose_engine(q.device, ctx.softcap, with_lse_gradient=d_lse is not None)
    # An empty row takes and gives no gradient, whatever comes from above; lse = inf makes its weights 0.
    empty = lse == -math.inf
    d_out = torch.zeros_like(out) if d_out is None else d_out.masked_fill(empty[..., None], 0.0)
    d_lse = None if d_lse is None else d_lse.masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty, math.inf)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for p in ctx.passes:
        for group in groups(p, k.shape[1]):
            view = _View(group, k.shape[1])
            q_rows, out_rows, d_out_rows = (view.of_queries(x) for x in (q, out, d_out))
            lse_rows, d_lse_rows = view.of_queries(lse), None if d_lse is None else view.of_queries(d_lse)
            dq_rows = view.of_queries(dq)
            k_sorted, v_sorted = (_gather(view.of_keys(x), group.key_rows) for x in (k, v))
            dk_sorted, dv_sorted = torch.zeros_like(k_sorted), torch.zeros_like(v_sorted)
            for tile in tiles(p, group):
                rows = group.rows[tile.queries]
                tile_lse = lse_rows.index_select(2, rows)
                if group.bias is not None:
                    tile_lse = tile_lse - group.bias[tile.queries]
                dq_part, dk_part, dv_part = engine.backward(
                    d_out_rows.index_select(2, rows),
                    None if d_lse_rows is None else d_lse_rows.index_select(2, rows),
                    q_rows.index_select(2, rows),
                    k_sorted[:, tile.keys],
                    v_sorted[:, tile.keys],
                    out_rows.index_select(2, rows),
                    tile_lse,
                    tile.allowed,
                    scale=ctx.scale,
                    softcap=ctx.softcap,
                )
                # A query stands once in a pass, so that no index repeats and the sum is deterministic.
                dq_rows.index_add_(2, rows, dq_part)
                dk_sorted[:, tile.keys] += dk_part
                dv_sorted[:, tile.keys] += dv_part
            view.of_keys(dk).index_add_(1, group.key_rows, dk_sorted)
            view.of_keys(dv).index_add_(1, group.key_rows, dv_sorted)
    return dq, dk, dv


class _View:
    """A group's part of a tensor: [P, R, Nq, ...] of per-query tensors, [P, Nk, ...] of per-key ones."""

    def __init__(self, group: Group, kv_heads: int) -> None:
        self.group, self.kv_heads = group, kv_heads

    def of_queries(self, x: Tensor) -> Tensor:
        """[B, Hq, Nq] or [B, Hq, Nq, D]; a view where x is contiguous."""
        g = self.group
        return x.unflatten(1, (self.kv_heads, -1))[g.batch, g.kv_heads, g.heads_in_group].flatten(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        """[B, Hkv, Nk, D]; a view where x is contiguous."""
        return x[self.group.batch, self.group.kv_heads].flatten(0, 1)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [P, N, D] in the order `rows` [K], dense, without a copy where that is what x is."""
    if len(rows) == x.shape[1] and bool((rows == torch.arange(len(rows), device=rows.device)).all()):
        return x.contiguous()
    return x.index_select(1, rows)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two disjoint sets of keys from the softmax over each; either may be empty."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)
    return out * (lse - finite).exp()[..., None] + part * (part_lse - finite).exp()[..., None], total
