"""Few queries against many keys, as in decoding: each query gathers its own keys and attends to those alone.

A query's N(i) is found by looking up which positions stand at the ranks near its own, not by sorting the keys: it
reads O(window) keys and values, beside O(Nk) cheap integers where there are documents and in scope "sequence". Column
counts depend on the pattern alone and no tensor is read on the host outside of eager CPU code, so that it compiles
into one graph.

Shapes: B' and H' are 1 where all rows or all heads share; Nq queries, Nk keys, C columns (places for keys) a query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import few_queries
from .call import Call
from .merge import apply_sink
from .plan import correction_bias
from .rank_tables import rank_table
from .validation import can_read

_MOST_QUERIES = 64  # beyond, queries share enough keys for sorting them once to be cheaper
_ELEMENTS_AT_ONCE = 1 << 24  # bounds what a slice of the queries gathers


def unsupported(call: Call) -> str | None:
    """Few queries that look back; any number where each has a permutation of its own, which nothing else can share."""
    if 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2]):
        return "no query or no key"
    if call.pattern.kind == "moba":
        return "MoBA chooses its keys by their content"
    if not call.causal:
        return "causal=True only"
    if call.permutes_each_prefix:
        return None
    if call.layout.queries_are_keys and call.q.shape[2] > 1:
        return "the queries are the keys themselves, and each key is wanted by many"
    if call.q.shape[2] > _MOST_QUERIES:
        return f"at most {_MOST_QUERIES} queries, got {call.q.shape[2]}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in the call's compute dtype; the sink is outside the lse."""
    k, v = call.k, call.v
    if sees_whole_past(call) or (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
        # Gathered rows are cast, few as they are; gradients of a key that many queries gather are summed before.
        k, v = k.to(call.compute_dtype), v.to(call.compute_dtype)
    size = max(1, _ELEMENTS_AT_ONCE // _elements_of_a_query(call))
    parts = [_attend(call, k, v, slice(begin, begin + size)) for begin in range(0, call.q.shape[2], size)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return (out if call.sink_logits is None else apply_sink(out, lse, call.sink_logits)), lse


def _elements_of_a_query(call: Call) -> int:
    batch, kv_heads, keys, width = call.v.shape
    if sees_whole_past(call):
        return batch * call.q.shape[1] * keys
    return batch * kv_heads * max(columns(call) * max(width, call.q.shape[-1]), keys)


def sees_whole_past(call: Call) -> bool:
    """Whether N(i) is all of the document up to i, whatever the length of the document."""
    p = call.pattern
    reach = 0 if p.kind == "strided" else p.reach
    return p.kind == "full" or max(reach, p.local_window, p.sinks) >= call.k.shape[2]


def columns(call: Call) -> int:
    """Keys that are gathered for each query, the places that stay empty included."""
    p = call.pattern
    if p.kind == "local":
        return p.reach + p.sinks
    if p.kind == "strided":
        return p.local_window + p.sinks + len(_strides(call))
    return p.local_window + p.sinks + (2 * p.reach - (p.shape == "sliding"))


def _strides(call: Call) -> range:
    """How far back the strided keys of a query stand, as many as there are keys for."""
    stride, keys = call.pattern.stride, call.k.shape[2]
    return range(0, min(call.pattern.reach, (keys - 1) // stride + 1) * stride, stride)


@dataclass(frozen=True)
class _Places:
    """Where the queries stand, found by counting the tokens of their documents.

    Attributes:
        token: int64 [B', Nq], the key index of each query.
        position: int64 [B', Nq], position in the document; 0 for padding.
        length: int64 [B', Nq], tokens in the document; 0 for padding.
        counted: int32 [B', Nq, Nk], how many tokens of the query's document stand at or before each key; None where
            all keys are one document, so that a position is a key index.
        member: bool [B', Nq, Nk], which keys are in the query's document; None likewise.
    """

    token: Tensor
    position: Tensor
    length: Tensor
    counted: Tensor | None
    member: Tensor | None

    @classmethod
    def of(cls, call: Call, queries: slice) -> _Places:
        documents, token = call.layout.documents, call.layout.query_token[:, queries]
        if documents is None:
            return cls(token, token, torch.full_like(token, call.layout.keys), None, None)
        rows = max(len(documents), len(token))
        documents, token = documents.expand(rows, -1), token.expand(rows, -1)
        own = documents.gather(-1, token)[..., None]
        member = (documents[:, None] == own) & (own >= 0)
        counted = member.cumsum(-1, dtype=torch.int32)
        position = (counted.gather(-1, token[..., None])[..., 0] - 1).clamp(min=0)
        return cls(token, position.long(), counted[..., -1].long(), counted, member)

    def slots(self, position: Tensor) -> Tensor:
        """The key at each position [B', H', Nq, C] of the query's document; for those it has not, any number."""
        if self.counted is None:
            return position
        wanted = (position + 1).to(torch.int32).movedim(2, 1)
        found = torch.searchsorted(self.counted, wanted.flatten(2).contiguous())
        return found.view(wanted.shape).movedim(1, 2)


@dataclass(frozen=True)
class Neighbours:
    """The keys of each query.

    Attributes:
        slot: int64 [B', H', Nq, C], the key in each column; the query's own where the column stays empty.
        allowed: bool [B', H', Nq, C], which columns hold a key.
        bias: compute dtype, broadcastable to the scores [B, H, Nq, C], or None.
    """

    slot: Tensor
    allowed: Tensor
    bias: Tensor | None


def neighbours(call: Call, queries: slice) -> Neighbours:
    """N(i) of some of the queries, each key in one column: the local window, the sinks, then the others."""
    places, pattern = _Places.of(call, queries), call.pattern
    i = places.position[:, None, :, None]
    span = pattern.reach if pattern.kind == "local" else pattern.local_window
    offsets = torch.arange(max(span, pattern.sinks), device=i.device)
    local, sinks = i - offsets[:span], offsets[: pattern.sinks].expand(*i.shape[:3], -1)
    position, allowed = [local, sinks], [local >= pattern.sinks, sinks <= i]
    bias = None
    if pattern.kind == "strided":
        back = _strides(call)
        strided = i - torch.arange(back.start, back.stop, back.step, device=i.device)
        position.append(strided)
        allowed.append((strided <= i - span) & (strided >= pattern.sinks))
    if pattern.kind == "stochastic":
        sampled, exists, ranks = _sampled(call, places)
        position.append(sampled)
        allowed.append(exists & (sampled <= i - span) & (sampled >= pattern.sinks))
        bias = correction_bias(call, ranks)
        bias = None if bias is None else F.pad(bias.expand(-1, -1, -1, sampled.shape[-1]), (span + pattern.sinks, 0))
    position, allowed = (
        torch.cat([x.expand(-1, parts[-1].shape[1], -1, -1) for x in parts], dim=-1) for parts in (position, allowed)
    )
    allowed = allowed & (places.length > 0)[:, None, :, None]
    slot = torch.where(allowed, places.slots(position), places.token[:, None, :, None])
    return Neighbours(slot, allowed, bias)


def _sampled(call: Call, places: _Places) -> tuple[Tensor, Tensor, Tensor]:
    """Keys by the stochastic rule, later ones and certain ones among them.

    Returns:
        their positions, int64 [B', H', Nq, C]; whether there is one, bool likewise; and the number of ranks that the
        query's permutation has, int64 [B', 1, Nq, 1].
    """
    pattern, w = call.pattern, call.pattern.reach
    rank, ranks, position_at = (_prefix_ranks if pattern.scope == "prefix" else _sequence_ranks)(call, places)
    if pattern.shape == "block":
        near = rank // (2 * w) * (2 * w) + torch.arange(2 * w, device=rank.device)
    else:
        near = rank + torch.arange(1 - w, w, device=rank.device)
    exists = (near >= 0) & (near < ranks)
    return position_at(torch.minimum(near.clamp(min=0), (ranks - 1).clamp(min=0))), exists, ranks


Ranks = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


def _prefix_ranks(call: Call, places: _Places) -> Ranks:
    """Scope "prefix": each query's rank [B', H', Nq, 1], its number of ranks [B', 1, Nq, 1], and ranks to positions."""
    w, keys = call.pattern.reach, call.layout.keys
    levels = 1
    while w << (levels - 1) < keys:
        levels += 1
    i = places.position[:, None, :, None]
    level = (i >= w << torch.arange(levels - 1, device=i.device)).sum(-1, keepdim=True)
    ranks = w << level
    table, head = _table(call, w, levels)
    begin = ranks - w  # where the table holds the level
    return table[0, head, begin + i].long(), ranks, lambda near: table[1, head, begin + near].long()


def _sequence_ranks(call: Call, places: _Places) -> Ranks:
    """Scope "sequence", likewise. The order of n tokens is that of more, those from n on left out."""
    capacity = 1 << (call.layout.keys - 1).bit_length()
    table, head = _table(call, capacity, 1)
    order = table[1, :, :capacity]
    length = places.position + 1 if call.decode else places.length
    ranks = length[:, None, :, None]
    counted = (order[:, None] < ranks).cumsum(-1, dtype=torch.int32)  # [B', H', Nq, capacity]
    rank = counted.gather(-1, table[0, head, places.position[:, None, :, None]].long()) - 1

    def position_at(near: Tensor) -> Tensor:
        at = torch.searchsorted(counted, (near + 1).to(torch.int32)).clamp(max=capacity - 1)
        return order[head, at].long()

    return rank.long(), ranks, position_at


def _table(call: Call, smallest: int, levels: int) -> tuple[Tensor, Tensor]:
    """The permutations, and the head index [H', 1, 1] that reads them by head."""
    device = call.k.device
    heads = call.k.shape[1] if call.pattern.per_head else 1
    table = rank_table(
        smallest, levels, seed=call.pattern.seed, step=call.step, layer=call.layer, heads=heads, device=device
    )
    return table, torch.arange(heads, device=device)[:, None, None]


def _attend(call: Call, k: Tensor, v: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
    """Attention of some of the queries, sinks left out."""
    q = call.q[:, :, queries]
    if sees_whole_past(call):
        return _by_products(call, q, k, v, queries, None)
    found = neighbours(call, queries)
    if few_queries.can_attend(call.k, call.v, call.compute_dtype):  # as given: not whether a gradient had them cast
        return _Compiled.apply(q, k, v, call, queries, found)
    return _by_products(call, q, k, v, queries, found)


class _Compiled(torch.autograd.Function):
    """The compiled kernel forward, whether or not a gradient is wanted: a recomputed layer gets the same numbers.

    The backward is that of `_by_products`.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context has no public type
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        queries: slice,
        found: Neighbours,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.call, ctx.queries, ctx.found = call, queries, found
        options = {"dtype": call.compute_dtype, "scale": call.scale, "softcap": call.softcap}
        return few_queries.attend(q, k, v, found.slot, found.allowed, found.bias, **options)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - its own arguments
        ctx: Any,  # noqa: ANN401
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()  # a second derivative is wanted
        wanted = ctx.needs_input_grad[:3]
        with torch.enable_grad(), torch.autocast(d_out.device.type, enabled=False):
            # Tensors of their own, as one tensor may be given for several; with the history only where it is needed.
            saved = (x.view_as(x) if differentiable else x.detach() for x in ctx.saved_tensors)
            q, k, v = (
                x if differentiable or not want else x.requires_grad_() for x, want in zip(saved, wanted, strict=True)
            )
            results = _by_products(ctx.call, q, k, v, ctx.queries, ctx.found)
            sources = [x for x, want in zip((q, k, v), wanted, strict=True) if want]
            # The lse does not depend on v, and so may have no gradient to pass on.
            passed = [(x, d) for x, d in zip(results, (d_out, d_lse), strict=True) if x.requires_grad]
            results, d_results = zip(*passed, strict=True)
            gradients = iter(torch.autograd.grad(results, sources, d_results, create_graph=differentiable))
        return (*(next(gradients) if want else None for want in wanted), None, None, None)


def _by_products(
    call: Call, q: Tensor, k: Tensor, v: Tensor, queries: slice, found: Neighbours | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by plain products over the keys that are `found`; None: over each query's whole past.

    Keys are held in sets: one a query, or one that all share where they see their whole past. Inside, shapes are
    [B, Hkv, sets, T, ...] for T query rows a set (query heads of the group, and queries where they share), and
    [B, Hkv, sets, C, ...] for its keys.
    """
    q = q.to(call.compute_dtype)
    heads, count, group = q.shape[1], q.shape[2], q.shape[1] // call.k.shape[1]
    q = q.unflatten(1, (-1, group)).transpose(2, 3)  # [B, Hkv, Nq, R, D]
    bias = None
    if found is None:
        allowed = _whole_past(call, queries)[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)[:, :, None]
        q = q.flatten(2, 3)[:, :, None]
        k, v = k[:, :, None], v[:, :, None]
    else:
        allowed, bias = found.allowed[:, :, :, None], None if found.bias is None else found.bias[:, :, :, None]
        k, v = (_rows(x, found.slot).to(call.compute_dtype) for x in (k, v))

    q, bad_q = _without_bad_rows(q)
    k, bad_k = _without_bad_rows(k)
    v, bad_v = _without_bad_rows(v)
    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + bias
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -math.inf).masked_fill(empty, 0.0)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v / total).masked_fill(empty, 0.0)
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    for bad in (bad_q, None if bad_k is None else bad_k.mT, None if bad_v is None else bad_v.mT):
        if bad is not None:
            poisoned = (allowed & bad).any(-1, keepdim=True)
            out, lse = out.masked_fill(poisoned, math.nan), lse.masked_fill(poisoned, math.nan)

    def in_order(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], count, group, -1).transpose(2, 3).reshape(-1, heads, count, x.shape[-1])

    return in_order(out), in_order(lse)[..., 0]


def _whole_past(call: Call, queries: slice) -> Tensor:
    """The keys at or before each query in its document: bool [B', Nq, Nk]."""
    places = _Places.of(call, queries)
    past = torch.arange(call.layout.keys, device=call.k.device) <= places.token[..., None]
    return past if places.member is None else past & places.member


def _rows(x: Tensor, slot: Tensor) -> Tensor:
    """Rows `slot` [B', H', Nq, C] of x [B, H, Nk, D]: [B, H, Nq, C, D]."""
    batch, heads, keys, width = x.shape
    slot = slot.expand(batch, heads, -1, -1)
    row = torch.arange(batch, device=x.device).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=x.device).view(-1, 1, 1)
    if x.is_contiguous():  # the common cache: the fastest way to read whole rows
        return F.embedding((row * heads + head) * keys + slot, x.view(-1, width))
    return x[row, head, slot]


def _without_bad_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with 0 for what is not finite, and which rows have such a value (bool, last dimension 1), None for no row.

    A masked key must be finite all the same: in the products 0 * NaN is NaN.
    """
    if can_read(x.device) and bool(x.detach().sum().isfinite()):
        return x, None
    bad = (x.detach() * 0).sum(-1, keepdim=True) != 0  # 0 * NaN and 0 * inf are NaN
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), bad
