"""The edges of one layer: which keys every query sees, as intervals of sorted keys and as a sparse matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..ops.call import Call
from ..ops.layout import make_layout
from ..ops.pattern import Pattern
from ..ops.plan import lower
from ..ops.validation import check_count

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

# Patterns by the names that commands take, each from one window.
PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "full": lambda _: Pattern.full(),
    "swa": lambda w: Pattern.local(w),
    "sa": lambda w: Pattern.stochastic(w),
    "sa-block": lambda w: Pattern.stochastic(w, shape="block"),
    "sa-prefix": lambda w: Pattern.stochastic(w, scope="prefix"),
    "sa-prefix-block": lambda w: Pattern.stochastic(w, scope="prefix", shape="block"),
    # The two paths of the gated layer see the union of their keys; the gates only weigh them.
    "gated": lambda w: Pattern.stochastic(w, local=w),
    # Half the window on each path: about as many keys as one path alone has.
    "gated-half": lambda w: Pattern.stochastic(max(1, w // 2), local=max(1, w // 2)),
    "moba": lambda w: Pattern.moba(block_size=max(1, w // 4), top_k=4),
}


@dataclass(frozen=True)
class Interval:
    """Queries that see runs of one order of keys: query[m] sees order[start[m] : stop[m]].

    All are int64: `order` [K], `query`, `start` and `stop` [M]. No run is empty.
    """

    order: NDArray[np.int64]
    query: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


@dataclass(frozen=True)
class Edges:
    """N(i) of every query of one layer: the union of its intervals, without the keys after i where `causal`."""

    n: int
    causal: bool
    intervals: list[Interval]


def layer_edges(pattern: Pattern, n: int, *, layer: int, causal: bool = True, seed: int = 0) -> Edges:
    """The edges of one document of n tokens in one layer, in O(n) memory (MoBA: O(n * top_k)).

    MoBA chooses by content, of which there is none here. Its model: the own block, and top_k - 1 past blocks drawn
    uniformly, anew for every query and layer, from `seed`. Other patterns take their chance from `pattern.seed`.

    Raises:
        ValueError: `n` is no positive integer, the pattern is not defined without causality, or it routes per head
            (a layer then has no one edge set).
    """
    check_count("n", n, minimum=1)
    check_count("seed", seed, minimum=0)
    pattern.check_causal(causal)
    if pattern.per_head:
        raise ValueError("per_head must be False: heads that route apart have no one edge set, got True")
    if pattern.kind == "moba":
        return Edges(n, causal, _random_blocks(pattern, n, np.random.default_rng([seed, layer])))
    token = torch.zeros(1, 1, n, 1)
    layout = make_layout(None, None, batch=1, queries=n, keys=n, device=token.device)
    call = Call.checked(token, token, token, pattern, layout=layout, layer=layer, causal=causal)
    intervals = []
    for p in lower(call):
        # A pass leaves out the keys that other passes hold; a union does not mind meeting them twice.
        used = (p.query_rows[0, 0] >= 0) & (p.stop[0, 0] > p.start[0, 0])
        query, start, stop = (x[0, 0][used].long().numpy() for x in (p.query_rows, p.start, p.stop))
        intervals.append(Interval(p.key_rows[0, 0].numpy(), query, start, stop))
    return Edges(n, causal, intervals)


def adjacency(edges: Edges) -> csr_array:
    """float64 CSR [n, n], 1 where query i (row) sees key j (column)."""
    from scipy.sparse import coo_array

    rows, columns = [], []
    for part in edges.intervals:
        lengths = part.stop - part.start
        row = np.repeat(part.query, lengths)
        slot = np.arange(len(row)) + np.repeat(part.stop - lengths.cumsum(), lengths)
        rows.append(row)
        columns.append(part.order[slot])
    row, column = np.concatenate(rows), np.concatenate(columns)
    if edges.causal:
        kept = column <= row
        row, column = row[kept], column[kept]
    matrix = coo_array((np.ones(len(row)), (row, column)), shape=(edges.n, edges.n)).tocsr()
    matrix.data[:] = 1.0  # a pair that two intervals hold is one edge
    return matrix


def _random_blocks(pattern: Pattern, n: int, chance: np.random.Generator) -> list[Interval]:
    position = np.arange(n)
    own = position // pattern.block_size
    intervals = [Interval(position, position, own * pattern.block_size, position + 1)]
    choices = min(pattern.top_k - 1, n // pattern.block_size)
    drawn: list[NDArray[np.int64]] = []
    for choice in range(choices):
        # Floyd's draw of `choices` out of `own` blocks; where there are fewer, the first steps draw none (-1).
        last = own - choices + choice
        block = chance.integers(0, last.clip(min=0), endpoint=True)
        taken = np.logical_or.reduce([block == other for other in drawn], axis=0, initial=False)
        drawn.append(np.where(last < 0, -1, np.where(taken, last, block)))
    for block in drawn:
        query = np.flatnonzero(block >= 0)
        start = block[query] * pattern.block_size
        intervals.append(Interval(position, query, start, start + pattern.block_size))
    return intervals
