"""How many tiles the kernels compute for a call, and how many pairs they are needed for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tiles as masks
from ..call import Call
from ..plan import Pass, Rule, lower
from .schedule import CHUNK, Schedule, Tiles, schedule


@dataclass(frozen=True)
class Work:
    """Of one direction of a call, summed over batch rows, query heads and passes.

    Attributes:
        tiles: tiles of block_m queries and block_n keys that are computed.
        masked_tiles: those of them that compare intervals and positions; in the others every pair is allowed.
        pairs_computed: pairs of query and key in the tiles.
        pairs_needed: pairs that the pattern allows.
    """

    tiles: int
    masked_tiles: int
    pairs_computed: int
    pairs_needed: int


def count_work(call: Call, block_m: int, block_n: int) -> Work:
    """Count what the kernels do for `call` with tiles of `block_m` queries and `block_n` keys.

    Forward and the gradient of queries compute these tiles. The gradients of keys go through the same tiles from the
    other side, with other sizes of blocks. Both sizes are powers of two from 16 to 128.
    """
    computed = masked = needed = 0
    for p in lower(call):
        s = schedule(call, p)
        orders = s.query_rows.shape[0] * s.query_rows.shape[1]
        shared = call.q.shape[0] * call.q.shape[1] // orders
        some, every = _count(s, s.tiles(block_m, block_n), block_n)
        computed += some * shared
        masked += (some - every) * shared
        needed += _pairs(p, call.k.shape[1]) * shared
    return Work(computed, masked, computed * block_m * block_n, needed)


def _count(s: Schedule, t: Tiles, block_n: int) -> tuple[int, int]:
    """(tiles computed, those of them that are allowed whole): the loop of the kernels over chunks of key tiles."""
    chunk = s.group // block_n or CHUNK
    step = chunk * block_n if s.group else block_n
    queries = t.queries[..., None].long().unbind(2)
    key_tiles = t.keys.shape[-1]
    keys = t.keys.expand(*t.queries.shape[:2], -1, -1)
    first = t.queries[:, :, 0].long() // step * (step // block_n)
    end = ((t.queries[:, :, 3].long() + step - 1) // step * (step // block_n)).clamp(max=key_tiles)
    place = torch.arange(chunk, device=first.device)
    computed = whole = 0
    while bool((first < end).any()):
        index = first[..., None] + place
        inside = index < end[..., None]
        at = index.clamp(max=key_tiles - 1).flatten(-2)
        near = [x.gather(-1, at).view_as(index).long() for x in keys.unbind(2)]
        some, every = (x & inside for x in _meet(queries, near, s.rule))
        # A chunk's tiles are computed from the first to the last that is needed.
        run = (some.cumsum(-1) > 0) & (some.flip(-1).cumsum(-1).flip(-1) > 0)
        computed += int(run.sum())
        whole += int((every & run).sum())
        first = first + chunk
    return computed, whole


def _meet(queries: tuple[Tensor, ...], keys: list[Tensor], rule: Rule | None) -> tuple[Tensor, Tensor]:
    """Mirrors `masks.meet`."""
    start_least, start_most, stop_least, stop_most, q_earliest, q_latest = queries
    low, high, k_earliest, k_latest = keys
    some = (start_least <= high) & (stop_most > low)
    every = (start_most <= low) & (stop_least > high)
    if rule is None:
        return some, every
    if rule.causal:
        some &= q_latest - rule.local >= k_earliest
        every &= q_earliest - rule.local >= k_latest
    elif rule.local:
        some &= (q_latest - k_earliest > rule.local) | (k_latest - q_earliest > rule.local)
        every &= (q_earliest - k_latest > rule.local) | (k_earliest - q_latest > rule.local)
    return some & (k_latest >= rule.sinks), every & (k_earliest >= rule.sinks)


def _pairs(p: Pass, kv_heads: int) -> int:
    """Allowed pairs of a pass, each order counted once."""
    if p.rule is None:
        return int(((p.stop - p.start).clamp(min=0) * (p.query_rows >= 0)).sum())
    total = 0
    for group in masks.groups(p, kv_heads):
        for tile in masks.tiles(p, group):
            sizes = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            total += sizes if tile.allowed is None else int(tile.allowed.sum())
    return total
