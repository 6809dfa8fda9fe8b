"""Cut a pass into tiles: runs of query slots, each with the key slots that it needs and a mask where it needs one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import Pass

_QUERIES = 128  # a tile's queries: enough for the matrix units, few enough that a window's halo stays small
_QUERIES_OF_ONE_HEAD = 256  # where every head has its own order, a tile is one head's and must be worth its overhead
_QUERIES_OF_A_BLOCK = 256  # where long runs of queries share their keys, there is no halo
_QUERIES_OF_FEW_KEYS = 2048  # where a tile meets a handful of keys (sinks), overhead rules
_FEW_KEYS = 32


@dataclass(frozen=True)
class Group:
    """One order of a pass and the rows and heads that share it: slices of [B], [Hkv] and the query heads of a group.

    `rows`, `start`, `stop`, `query_position`, `bias` [M] hold the queries that see any key, `key_rows` and
    `key_position` [K] all key slots.
    """

    batch: slice
    kv_heads: slice
    heads_in_group: slice
    rows: Tensor
    key_rows: Tensor
    start: Tensor
    stop: Tensor
    query_position: Tensor
    key_position: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Tile:
    """Query slots `queries` against key slots `keys`; `allowed` [T, K] is None where every pair is."""

    queries: slice
    keys: slice
    allowed: Tensor | None


def groups(p: Pass, kv_heads: int) -> Iterator[Group]:
    """The distinct orders of a pass."""
    orders = p.query_rows.shape[:2]
    for b in range(orders[0]):
        for h in range(orders[1]):
            rows = p.query_rows[b, h]
            used = (rows >= 0) & (p.stop[b, h] > p.start[b, h])
            key_at = min(b, p.key_rows.shape[0] - 1), min(h, p.key_rows.shape[1] - 1)
            in_group = slice(None)
            if orders[1] == 1:
                kv = slice(None)
            elif orders[1] == kv_heads:
                kv = slice(h, h + 1)
            else:
                size = orders[1] // kv_heads
                kv, in_group = slice(h // size, h // size + 1), slice(h % size, h % size + 1)
            yield Group(
                batch=slice(None) if orders[0] == 1 else slice(b, b + 1),
                kv_heads=kv,
                heads_in_group=in_group,
                rows=rows[used],
                key_rows=p.key_rows[key_at],
                start=p.start[b, h][used],
                stop=p.stop[b, h][used],
                query_position=p.query_position[b, h][used],
                key_position=p.key_position[key_at],
                bias=None if p.bias is None else p.bias[b, h][used],
            )


def tiles(p: Pass, group: Group) -> Iterator[Tile]:
    """Tiles that cover every query slot of the group once, and every pair it may meet."""
    if not len(group.rows):
        return
    bounds = _cut(group.start, group.stop, _QUERIES if p.query_rows.shape[1] == 1 else _QUERIES_OF_ONE_HEAD)
    inner = torch.tensor(bounds[:-1], device=group.start.device)
    tile_of = torch.zeros_like(group.rows).scatter_(0, inner, 1).cumsum(0) - 1
    extremes = [
        torch.empty(len(inner), dtype=group.start.dtype, device=group.start.device)
        .scatter_reduce_(0, tile_of, x, reduce=how, include_self=False)
        .tolist()
        for x, how in ((group.start, "amin"), (group.start, "amax"), (group.stop, "amin"), (group.stop, "amax"))
    ]
    bands = _Bands()
    for begin, end, low, low_max, high_min, high in zip(bounds, bounds[1:], *extremes, strict=False):
        queries, keys = slice(begin, end), slice(low, high)
        allowed = None
        if low < low_max or high_min < high:
            allowed = bands.mask(group.start[queries] - low, group.stop[queries] - low, high - low)
        if p.rule is not None:
            by_rule = p.rule.allows(group.query_position[queries, None], group.key_position[keys])
            allowed = by_rule if allowed is None else by_rule.logical_and_(allowed)
        yield Tile(queries, keys, allowed)


class _Bands:
    """Interval masks of the last tiles, kept for the next ones: counted from a tile's first key, they mostly repeat."""

    _KEPT = 8

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def mask(self, start: Tensor, stop: Tensor, keys: int) -> Tensor:
        """Bool [T, keys]: start <= slot < stop."""
        shape = (len(start), keys)
        if shape in self._known:
            known_start, known_stop, mask = self._known[shape]
            if torch.equal(known_start, start) and torch.equal(known_stop, stop):
                return mask
        slots = torch.arange(keys, dtype=start.dtype, device=start.device)
        mask = (slots >= start[:, None]) & (slots < stop[:, None])
        self._known[shape] = start, stop, mask
        if len(self._known) > self._KEPT:
            del self._known[next(iter(self._known))]
        return mask


def _cut(start: Tensor, stop: Tensor, size: int) -> list[int]:
    """Ends of the tiles, 0 first: every `size` slots, and where a long run of queries with one common start begins."""
    slots = torch.arange(len(start), device=start.device)
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[1:] = start[1:] != start[:-1]
    run = opens.cumsum(0) - 1
    lengths = torch.zeros_like(run).scatter_add_(0, run, torch.ones_like(run))[run]
    shortest = int(lengths.min())
    if shortest >= _QUERIES_OF_A_BLOCK:
        size = _QUERIES_OF_FEW_KEYS if int((stop - start).max()) <= _FEW_KEYS else _QUERIES_OF_A_BLOCK
    anchors = opens & (lengths >= size // 2)
    since = slots - torch.where(anchors, slots, 0).cummax(0).values
    cuts = (since % size == 0) | anchors
    return [*cuts.nonzero()[:, 0].tolist(), len(start)]
