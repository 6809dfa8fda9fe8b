"""Lower a call to passes: orders of queries and keys in which every query's keys are one contiguous interval.

Whatever the pattern, sorting the tokens well makes N(i) an interval of sorted keys (up to causality and to keys that
another pass has taken). So one backend loop serves all patterns, and a backend never sees documents, scopes or shapes:

    local       tokens in document order               [i - window + 1, i]
    sinks       the first tokens of each document      all of them, up to i
    strided     tokens by position mod stride          the last `window` in its class
    sliding     tokens in rank order                   (rank - window, rank + window), keys after i masked out
    block       rank blocks, each in document order    from the block's first token to i, exact
    prefix      one such pass a level, over the queries that use the level
    BigBird     document order                         the own block up to i, then one pass a drawn block
    MoBA        document order                         the own block up to i, then one pass a chosen block

A query may appear in several passes, over disjoint keys; backends merge them by their log-sum-exp.

Shapes: B' and H' are 1 where all rows or all heads share an order; M query slots, K key slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .call import Call
from .layout import Layout
from .moba import choose_blocks
from .pattern import Pattern
from .routing import draw_distinct, head_words, inverse_permutation, routing_keys

_LAST = torch.iinfo(torch.int64).max
_Keys = Callable[[Tensor], Tensor]  # of a call: the routing keys of positions, see `routing_keys`


@dataclass(frozen=True)
class Rule:
    """What the interval alone does not say, on original positions: d = i - j.

    Causal: d >= local. Otherwise abs(d) > local where local > 0. Both: j >= sinks. With `local` and `sinks` at 0 this
    is causality; otherwise it also leaves out the keys of the local window and the sinks, which their own passes hold.
    """

    causal: bool
    local: int
    sinks: int

    def allows(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Bool, the broadcast of the two position tensors; a new tensor."""
        if self.causal:
            allowed = key_position <= query_position - self.local
        elif self.local:
            allowed = (query_position - key_position).abs() > self.local
        else:
            allowed = torch.ones_like(query_position - key_position, dtype=torch.bool)
        return allowed.logical_and_(key_position >= self.sinks) if self.sinks else allowed

    @property
    def leaves_rows_empty(self) -> bool:
        """Whether a query with a non-empty interval may have no key left."""
        return bool(self.local or self.sinks)


@dataclass(frozen=True)
class Pass:
    """One order of queries and keys.

    Attributes:
        query_rows: int64 [B', H', M], the query in each slot; -1 marks an unused slot.
        key_rows: int64 [B', H' or 1, K], the key in each slot.
        start, stop: int32 [B', H', M], the key slots [start, stop) that the query in the slot may see.
        rule: what else must hold of a pair in the interval; None where the interval is exact.
        query_position, key_position: int32, positions in the document, in slot order, for `rule`.
        bias: compute dtype [B', H', M] or None, added to all of a query's scores in this pass.
        fresh: no earlier pass holds any of these queries, so there is nothing to merge with.
    """

    query_rows: Tensor
    key_rows: Tensor
    start: Tensor
    stop: Tensor
    rule: Rule | None
    query_position: Tensor
    key_position: Tensor
    bias: Tensor | None
    fresh: bool


def lower(call: Call, draw: Callable[..., Tensor] | None = None) -> list[Pass]:
    """The passes of a call, in the order in which they are merged.

    `draw` replaces `routing_keys`, where a backend has its own way to the same bits.
    """
    pattern, layout = call.pattern, call.layout
    if pattern.kind == "moba":
        return _moba_passes(call)
    if pattern.saturation >= layout.longest:
        return _drop_empty([_local_pass(layout, None, 0, call.causal)])
    if pattern.kind == "local":
        certain = _certain_passes(layout, pattern.reach, pattern.sinks, call.causal)
        return _drop_empty(certain)
    passes = _certain_passes(layout, pattern.local_window, pattern.sinks, call.causal)
    fresh = not passes
    if pattern.kind == "strided":
        return _drop_empty([*passes, _strided_pass(call, fresh)])
    if pattern.kind == "bigbird":
        return _drop_empty([*passes, *_bigbird_passes(call, fresh)])
    heads = head_words(call.k.shape[1] if pattern.per_head else 1, call.k.device)  # a key/value group always shares
    keys = partial(draw or routing_keys, seed=pattern.seed, step=call.step, layer=call.layer, head=heads)
    passes += _prefix_passes(call, keys, fresh) if pattern.scope == "prefix" else [_sequence_pass(call, keys, fresh)]
    return _drop_empty(passes)


def _drop_empty(passes: list[Pass]) -> list[Pass]:
    return [p for p in passes if p.query_rows.shape[-1] and p.key_rows.shape[-1]]


def _most(chosen: Tensor) -> int:
    """The largest count of True along the last dimension."""
    return int(chosen.sum(-1).max()) if chosen.numel() else 0


def _search(ordered: Tensor, values: Tensor) -> Tensor:
    """First place in `ordered` [..., K] at or above each of `values` [..., M], leading dimensions broadcast."""
    lead = torch.broadcast_shapes(ordered.shape[:-1], values.shape[:-1])
    return torch.searchsorted(ordered.expand(*lead, -1).contiguous(), values.expand(*lead, -1).contiguous())


def _make_pass(
    layout: Layout,
    key_order: Tensor,
    query_slot: Tensor,
    start: Tensor,
    stop: Tensor,
    *,
    chosen: Tensor | None = None,
    count: int | None = None,
    rule: Rule | None = None,
    bias: Tensor | None = None,
    fresh: bool = False,
) -> Pass:
    """Sort the chosen queries by `query_slot` and bring their facts [B', H', Nq] into that order.

    `count` is how many are chosen, where that is known without reading a tensor. Where all are, of a single document,
    `query_slot` is a permutation.
    """
    if layout.is_single and chosen is None:
        query_rows = rows = inverse_permutation(query_slot)
    else:
        is_token = layout.of_queries(layout.first)[:, None] >= 0
        chosen = is_token.expand_as(query_slot) if chosen is None else chosen & is_token
        slots, rows = torch.where(chosen, query_slot, _LAST).sort(dim=-1, stable=True)
        used = _most(chosen) if count is None else count
        slots, rows = slots[..., :used], rows[..., :used]
        query_rows = rows.masked_fill(slots == _LAST, -1)

    def in_order(fact: Tensor) -> Tensor:
        return fact.expand_as(query_slot).gather(-1, rows)

    position = layout.position[:, None].to(torch.int32)
    return Pass(
        query_rows=query_rows,
        key_rows=key_order,
        start=in_order(start.to(torch.int32)),
        stop=in_order(stop.to(torch.int32)),
        rule=rule,
        query_position=in_order(layout.of_queries(position)),
        key_position=position.expand(*key_order.shape[:2], -1).gather(-1, key_order),
        bias=None if bias is None else in_order(bias),
        fresh=fresh,
    )


def _local_pass(layout: Layout, span: int | None, sinks: int, causal: bool) -> Pass:
    """The last `span` positions (None: all), those before `sinks` left to the sinks' own pass."""
    first, position, length = (x[:, None] for x in (layout.first, layout.position, layout.length))
    back, ahead = (position, length) if span is None else (span - 1, 0) if causal else (span, span)
    stop = first + (position if causal else torch.minimum(position + ahead, length - 1)) + 1
    start = torch.minimum(first + (position - back).clamp(min=sinks), stop)
    query_slot, start, stop = (layout.of_queries(x) for x in (layout.packed[:, None], start, stop))
    return _make_pass(layout, layout.packed_order[:, None], query_slot, start, stop, fresh=True)


def _certain_passes(layout: Layout, span: int, sinks: int, causal: bool) -> list[Pass]:
    """The local window and the sinks, where there are any."""
    passes = [_local_pass(layout, span, sinks, causal)] if span else []
    if not sinks:
        return passes
    first, position, length = (x[:, None] for x in (layout.first, layout.position, layout.length))
    key = torch.where((first >= 0) & (position < sinks), first + position, _LAST)
    key, order = key.sort(dim=-1, stable=True)
    kept = min(sinks, key.shape[-1]) if layout.is_single else _most(key < _LAST)
    key, order = key[..., :kept], order[..., :kept]
    seen = length.clamp(max=sinks)
    if causal:
        seen = torch.minimum(seen, position + 1)
    query_slot, first, seen = (layout.of_queries(x) for x in (layout.packed[:, None], first, seen))
    start = _search(key, first)
    passes.append(_make_pass(layout, order, query_slot, start, start + seen, fresh=not passes))
    return passes


def _exclusions(pattern: Pattern, causal: bool, *, exact: bool) -> Rule | None:
    """The rule of a pass beside certain ones; `exact` where its intervals already keep causality."""
    if exact and not pattern.local_window and not pattern.sinks:
        return None
    return Rule(causal, pattern.local_window, pattern.sinks)


def _strided_pass(call: Call, fresh: bool) -> Pass:
    """Positions that are equal modulo the stride, a class, stand together, in document order."""
    pattern, layout, stride = call.pattern, call.layout, call.pattern.stride
    first, position, length = (x[:, None] for x in (layout.first, layout.position, layout.length))
    order = torch.where(first < 0, _LAST, (first << 32) | position % stride).argsort(dim=-1, stable=True)
    slot = inverse_permutation(order)
    before, after = position // stride, (length - 1 - position) // stride
    start = slot - before.clamp(max=pattern.reach - 1 if call.causal else pattern.reach)
    stop = slot + 1 if call.causal else slot + 1 + after.clamp(max=pattern.reach)
    slot, start, stop = (layout.of_queries(x) for x in (slot, start, stop))
    rule = _exclusions(pattern, call.causal, exact=True)
    return _make_pass(layout, order, slot, start, stop, rule=rule, fresh=fresh)


def correction_bias(call: Call, ranks: Tensor) -> Tensor | None:
    """correction * log(1 / p) for queries whose permutation has `ranks` ranks, None without correction."""
    pattern = call.pattern
    if not pattern.correction:
        return None
    chance = ((2 * pattern.reach - 1) / ranks.clamp(min=1).to(call.compute_dtype)).clamp(max=1.0)
    return -pattern.correction * chance.log()


def _sequence_pass(call: Call, keys: _Keys, fresh: bool) -> Pass:
    """Scope "sequence": one permutation a document, over its own length."""
    pattern, layout, w = call.pattern, call.layout, call.pattern.reach
    first, position, length = (x[:, None] for x in (layout.first, layout.position, layout.length))
    order = torch.where(first < 0, _LAST, (first << 32) | keys(position)).argsort(dim=-1, stable=True)
    slot = inverse_permutation(order)
    rank = slot - first
    if pattern.shape == "block":
        start = first + rank // (2 * w) * (2 * w)
        order = torch.where(first < 0, _LAST, start).argsort(dim=-1, stable=True)
        slot = inverse_permutation(order)
        stop = slot + 1 if call.causal else torch.minimum(start + 2 * w, first + length)
    else:
        reach = w if call.causal else w + 1
        start = first + (rank - reach + 1).clamp(min=0)
        stop = first + torch.minimum(rank + reach, length)
    exact = pattern.shape == "block" or not call.causal
    bias = correction_bias(call, length)
    slot, start, stop = (layout.of_queries(x) for x in (slot, start, stop))
    return _make_pass(
        layout,
        order,
        slot,
        start,
        stop,
        rule=_exclusions(pattern, call.causal, exact=exact),
        bias=None if bias is None else layout.of_queries(bias),
        fresh=fresh,
    )


def _prefix_passes(call: Call, keys: _Keys, fresh: bool) -> list[Pass]:
    """Scope "prefix": the queries of level m, i + 1 in (L / 2, L], over the first L = window * 2**m positions."""
    passes = []
    w = call.pattern.reach
    level = 0
    while level == 0 or w << (level - 1) < call.layout.longest:
        if level or call.pattern.local_window < w:  # else the local window already holds all of the first level
            passes.append(_level_pass(call, keys, level, fresh))
        level += 1
    return passes


def _level_pass(call: Call, keys: _Keys, level: int, fresh: bool) -> Pass:
    pattern, layout, w = call.pattern, call.layout, call.pattern.reach
    ranks = w << level
    oldest = ranks // 2 if level else 0
    held = min(ranks, layout.position.shape[-1]) if layout.is_single else layout.position.shape[-1]
    first, position, length = (x[:, None, :held] for x in (layout.first, layout.position, layout.length))
    drawn = keys(torch.arange(ranks, device=call.k.device)).view(-1, ranks)
    rank = inverse_permutation(drawn.argsort(dim=-1, stable=True))[:, position[:, 0].clamp(max=ranks - 1)].movedim(0, 1)
    in_blocks = pattern.shape == "block" or level == 0  # at level 0 all ranks are near: one block
    place = first * ranks + (rank // (2 * w) * (2 * w) if in_blocks else rank)
    member = (first >= 0) & (position < ranks) & (length > oldest)
    place_in_order, order = torch.where(member, place, _LAST).sort(dim=-1, stable=True)
    slot = inverse_permutation(order)
    kept = held if layout.is_single else _most(member)
    place_in_order, order = place_in_order[..., :kept], order[..., :kept]

    # Each query's own token is a member of its level, and its facts are read there.
    mine = layout.of_queries(layout.position[:, None])
    chosen = (mine >= oldest) & (mine < ranks)
    first, rank, place, slot = (layout.of_queries(x) for x in (first, rank, place, slot))
    if in_blocks:
        start = _search(place_in_order, place)
        stop = slot + 1
    else:
        start = _search(place_in_order, first * ranks + (rank - w + 1).clamp(min=0))
        stop = _search(place_in_order, first * ranks + (rank + w).clamp(max=ranks))
    bias = correction_bias(call, torch.full_like(mine, ranks))
    return _make_pass(
        layout,
        order,
        slot,
        start,
        stop,
        chosen=chosen.expand_as(slot),
        count=held - oldest if layout.is_single else None,
        rule=_exclusions(pattern, True, exact=in_blocks),
        bias=bias,
        fresh=fresh,
    )


def _bigbird_passes(call: Call, fresh: bool) -> list[Pass]:
    """The own block, exact, then the drawn blocks one at a time."""
    pattern, layout, size = call.pattern, call.layout, call.pattern.block_size
    first, position, slot = (layout.of_queries(x[:, None]) for x in (layout.first, layout.position, layout.packed))
    order, rule = layout.packed_order[:, None], _exclusions(pattern, True, exact=True)
    own = position // size
    passes = []
    if pattern.local_window < size:  # else the local window already holds all of it
        passes.append(_make_pass(layout, order, slot, first + own * size, slot + 1, rule=rule, fresh=fresh))
    drawn = draw_distinct(own, pattern.random_blocks, seed=pattern.seed, step=call.step, layer=call.layer)
    for block in drawn.unbind(-1):
        start = first + block * size
        passes.append(_make_pass(layout, order, start, start, start + size, chosen=block >= 0, rule=rule))
    return passes


def _moba_passes(call: Call) -> list[Pass]:
    """The own block, exact, then the chosen blocks one at a time: every query at most once a pass."""
    layout, size = call.layout, call.pattern.block_size
    first, position = layout.first[:, None], layout.position[:, None]
    own_start, own_slot = layout.of_queries(first + position // size * size), layout.of_queries(layout.packed[:, None])
    order = layout.packed_order[:, None]
    own = _make_pass(layout, order, own_slot, own_start, own_slot + 1, fresh=True)
    past = [
        _make_pass(layout, order, start, start, start + size, chosen=start >= 0)  # -1: fewer blocks than choices
        for start in choose_blocks(call).unbind(-1)
    ]
    return _drop_empty([own, *past])
