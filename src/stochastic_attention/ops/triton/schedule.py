"""A pass as the kernels walk it: tokens sorted by position inside groups of slots, tiles, and which tiles meet.

Near in rank, keys stand anywhere in position, so that a causal tile of ranks would be half future, spread over all of
it. So in such a pass each group of neighbouring slots is sorted by position: the tiles of a group are then apart in
position, and those that lie in the future are not touched. A key keeps the number of its slot, which is what the
intervals of the queries speak of.

All of it is made on the device, without reading it, in memory that grows with the number of tokens.

Shapes: B', H' as in `plan`; M query slots, K key slots, in tiles of BM and BN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import Call
from ..plan import Pass, Rule

NONE = torch.iinfo(torch.int32).max  # stands for the extreme of no number
CHUNK = 32  # tiles that a kernel looks at together: the bits of a word
_SMALLEST_GROUP = 128  # a multiple of every tile


@dataclass(frozen=True)
class Schedule:
    """One pass, all int32.

    Attributes:
        query_rows: [B', H', M], the query in each slot, -1 where there is none or it sees no key.
        start, stop, query_position, bias: [B', H', M], as in `Pass`.
        key_rows, key_position: [B', H' or 1, K].
        key_slot: [B', H' or 1, K], the slot of `Pass` that each key stood in; None where that is where it stands.
        group: slots that were sorted together, 0 where none were.
    """

    query_rows: Tensor
    start: Tensor
    stop: Tensor
    query_position: Tensor
    bias: Tensor | None
    key_rows: Tensor
    key_position: Tensor
    key_slot: Tensor | None
    rule: Rule | None
    fresh: bool
    group: int
    _tiles: dict[tuple[int, int], Tiles] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Of the tensors, tiles aside."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))

    def tiles(self, block_m: int, block_n: int) -> Tiles:
        """The pass in tiles of `block_m` queries and `block_n` keys."""
        if (block_m, block_n) not in self._tiles:
            self._tiles[block_m, block_n] = _cut(self, block_m, block_n)
        return self._tiles[block_m, block_n]


@dataclass(frozen=True)
class Tiles:
    """Extremes over each tile, int32, `NONE` or an empty range where a tile is empty.

    Attributes:
        queries: [B', H', 6, M / BM]: least and greatest start, least and greatest stop, earliest and latest position.
        keys: [B', H' or 1, 4, K / BN]: least and greatest slot, earliest and latest position.
        reach: [B', H', 2, K / BN]: the first query tile that may see a key of the tile, and the end of such tiles.
    """

    queries: Tensor
    keys: Tensor
    reach: Tensor


def schedule(call: Call, p: Pass) -> Schedule:
    """Sort the groups of a pass of `call`, where that saves work."""
    order_q = order_k = None
    used = (p.query_rows >= 0) & (p.stop > p.start)
    group = _group(call) if p.rule is not None and p.rule.causal else 0
    if group:
        order_q = _sort_groups(p.query_position.masked_fill(~used, NONE), group)
        order_k = _sort_groups(p.key_position, group)

    def sort(x: Tensor, order: Tensor | None) -> Tensor:
        return x.contiguous() if order is None else x.gather(-1, order)

    return Schedule(
        query_rows=sort(p.query_rows.to(torch.int32).masked_fill(~used, -1), order_q),
        start=sort(p.start, order_q),
        stop=sort(p.stop, order_q),
        query_position=sort(p.query_position, order_q),
        bias=None if p.bias is None else sort(p.bias, order_q),
        key_rows=sort(p.key_rows.to(torch.int32), order_k),
        key_position=sort(p.key_position, order_k),
        key_slot=None if order_k is None else order_k.to(torch.int32),
        rule=p.rule,
        fresh=p.fresh,
        group=group,
    )


def _group(call: Call) -> int:
    """Slots to sort together, 0 for none: large groups tell positions apart, and add a larger halo.

    The power of two is the one that computes the fewest tiles. In scope "prefix" none pays: half of a level's keys
    are earlier than all of its queries anyway.
    """
    pattern = call.pattern
    by_rank = pattern.kind == "stochastic" and pattern.shape == "sliding" and pattern.scope == "sequence"
    if not by_rank or pattern.reach < 2 * _SMALLEST_GROUP:
        return 0
    return 1 << (math.isqrt(2 * _SMALLEST_GROUP * pattern.reach).bit_length() - 1)


def _sort_groups(position: Tensor, size: int) -> Tensor:
    """int64 like `position`: the order by position inside each run of `size` slots."""
    slots = position.shape[-1]
    padded = pad(position, (0, -slots % size), value=NONE).unflatten(-1, (-1, size))
    begin = torch.arange(0, padded.shape[-2] * size, size, device=position.device)
    return (padded.argsort(dim=-1, stable=True) + begin[:, None]).flatten(-2)[..., :slots]


def _cut(s: Schedule, block_m: int, block_n: int) -> Tiles:
    assert s.group % block_m == s.group % block_n == 0
    used = s.query_rows >= 0
    start, stop, position = (
        (_extreme(x, block_m, used, NONE), _extreme(x, block_m, used, -1)) for x in (s.start, s.stop, s.query_position)
    )
    if s.key_slot is None:
        low = torch.arange(0, s.key_rows.shape[-1], block_n, dtype=torch.int32, device=s.key_rows.device)
        high = (low + block_n - 1).masked_fill(low + block_n > s.key_rows.shape[-1], NONE)
        slot = tuple(x.expand(*s.key_rows.shape[:2], -1) for x in (low, high))
    else:
        slot = _extreme(s.key_slot, block_n, None, NONE), _extreme(s.key_slot, block_n, None, -1)
        if s.key_rows.shape[-1] % block_n:
            slot[1][..., -1] = NONE
    place = _extreme(s.key_position, block_n, None, NONE), _extreme(s.key_position, block_n, None, -1)
    # Intervals rise with the slot, so that the tiles which reach a key are neighbours; the running extremes make that
    # hold for the mixed tiles of a group, and for empty ones.
    ends_before = stop[1].cummax(-1).values
    begins_after = start[0].flip(-1).cummin(-1).values.flip(-1)
    orders = s.query_rows.shape[:2]
    reach = [
        torch.searchsorted(ordered.contiguous(), bound.expand(*orders, -1).contiguous(), right=True, out_int32=True)
        for ordered, bound in ((ends_before, slot[0]), (begins_after, slot[1]))
    ]
    return Tiles(
        queries=torch.stack([*start, *stop, *position], dim=2),
        keys=torch.stack([*slot, *place], dim=2),
        reach=torch.stack(reach, dim=2),
    )


def _extreme(x: Tensor, block: int, used: Tensor | None, of_none: int) -> Tensor:
    """The least of each `block` values in use, or with `of_none` = -1 the greatest."""
    x = x if used is None else x.masked_fill(~used, of_none)
    x = pad(x, (0, -x.shape[-1] % block), value=of_none).unflatten(-1, (-1, block))
    return x.amax(-1) if of_none == -1 else x.amin(-1)
