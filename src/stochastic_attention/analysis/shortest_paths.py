"""Shortest paths from many sources at once: breadth-first search with 64 sources a machine word.

Bit s of a node's word says that source s has reached it. A level is one OR over each node's neighbours, so 64 searches
cost about what one does, in O(N + edges) memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from ..ops.validation import check_count
from ..records import Estimate
from .graph import Adjacency, as_graph

_WORD = 64
# Node-edge products that a few seconds of search can afford; past this, sources are sampled by default.
_EXACT_WORK = 4e9
_SAMPLE = 1024


@dataclass(frozen=True)
class PathLengths:
    """Shortest paths from `sources` of `nodes` nodes, to every other node.

    Standard errors are those of sampling the sources, 0 where all nodes are sources.

    Attributes:
        mean: mean length over the reachable pairs, None where there is none. Unreachable pairs are left out here.
        efficiency: mean of 1 / length over all pairs, 0 for an unreachable one (harmonic, or global, efficiency).
        reachable: share of the pairs that a path joins.
        pairs_by_length: reachable pairs of length 1, 2, ... from these sources.
    """

    nodes: int
    sources: int
    mean: Estimate | None
    efficiency: Estimate
    reachable: Estimate
    pairs_by_length: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every node was a source."""
        return self.sources == self.nodes


def default_sources(nodes: int, edges: int) -> int:
    """All nodes where that takes seconds, else 1,024."""
    return nodes if nodes * edges <= _EXACT_WORK else min(nodes, _SAMPLE)


def batches(sources: int) -> int:
    """How often `path_lengths` ticks."""
    return -(-sources // _WORD)


def path_lengths(
    adjacency: Adjacency,
    *,
    directed: bool,
    sources: int | None = None,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> PathLengths:
    """Measure shortest paths.

    Args:
        adjacency: see `as_graph`.
        directed: along the edges; otherwise on the symmetrised graph.
        sources: nodes to search from, drawn without replacement; None is `default_sources`, N is exact.
        seed: of the draw.
        tick: called after every 64 sources.
    """
    graph = as_graph(adjacency)
    n = graph.nodes
    check_count("nodes", n, minimum=2)
    sources = default_sources(n, graph.edges) if sources is None else sources
    check_count("sources", sources, minimum=1, maximum=n)
    check_count("seed", seed, minimum=0)
    # Row v: the nodes that v is reached from.
    incoming = sparse.csr_array(graph.adjacency.T) if directed else graph.undirected
    drawn = np.arange(n) if sources == n else np.random.default_rng(seed).choice(n, sources, replace=False)
    found = []  # [levels, sources of the batch] each
    for begin in range(0, sources, _WORD):
        found.append(_search(incoming, drawn[begin : begin + _WORD]))
        tick()
    levels = max(len(counts) for counts in found)
    counts = np.concatenate([np.pad(c, ((0, levels - len(c)), (0, 0))) for c in found], axis=1)
    length = np.arange(1, levels + 1)
    pairs, total, harmonic = counts.sum(0), length @ counts, (1 / length) @ counts
    return PathLengths(
        nodes=n,
        sources=sources,
        mean=_ratio(total, pairs, n) if pairs.any() else None,
        efficiency=_ratio(harmonic, np.full(sources, n - 1), n),
        reachable=_ratio(pairs, np.full(sources, n - 1), n),
        pairs_by_length=tuple(int(x) for x in counts.sum(1)),
    )


def _search(incoming: sparse.csr_array, sources: np.ndarray) -> np.ndarray:
    """Nodes at distance 1, 2, ... of each source: int64 [levels, sources]."""
    n = len(incoming.indptr) - 1
    bits = np.zeros((n, _WORD), np.uint8)
    bits[sources, np.arange(len(sources))] = 1
    reached = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    has = np.flatnonzero(np.diff(incoming.indptr))
    starts = incoming.indptr[has].astype(np.intp)
    neighbours = incoming.indices.astype(np.intp)
    words = np.empty(len(neighbours), np.uint64)
    levels = []
    while len(has):
        reached.take(neighbours, out=words, mode="clip")
        new = np.bitwise_or.reduceat(words, starts) & ~reached[has]
        if not new.any():
            break
        reached[has] |= new
        found = new[new != 0]
        levels.append(np.unpackbits(found.view(np.uint8).reshape(-1, _WORD // 8), axis=1).sum(0, dtype=np.int64))
    return np.array(levels, dtype=np.int64).reshape(-1, _WORD)[:, : len(sources)]


def _ratio(totals: np.ndarray, weights: np.ndarray, population: int) -> Estimate:
    """sum(totals) / sum(weights) over sampled sources, with the ratio estimator's standard error."""
    value, n = totals.sum() / weights.sum(), len(totals)
    stderr = None
    if n > 1:
        spread = np.sum((totals - value * weights) ** 2) / (n - 1)
        stderr = float(math.sqrt((1 - n / population) * spread / n) / weights.mean())
    return Estimate(float(value), stderr, n)
