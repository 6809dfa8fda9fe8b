"""Exact measures of a directed graph. Each says which graph it is of: the directed one, or the symmetrised one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import igraph
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from .graph import Adjacency, Graph, as_graph

# Entries of sparse rows that are held at once.
_BLOCK = 2**21


@dataclass(frozen=True)
class Degrees:
    """Mean, standard deviation, median and maximum of a degree."""

    mean: float
    deviation: float
    median: float
    most: int

    @classmethod
    def of(cls, degrees: np.ndarray) -> Degrees:
        """Summarise int [N]."""
        return cls(float(degrees.mean()), float(degrees.std()), float(np.median(degrees)), int(degrees.max()))


@dataclass(frozen=True)
class Components:
    """How many, and the nodes of the largest."""

    count: int
    largest: int


@dataclass(frozen=True)
class Clustering:
    """Clustering of the symmetrised graph.

    Attributes:
        transitivity: 3 * triangles / connected triples; 0 where there is no triple. The C of every null model here.
        local: mean over the nodes of the share of a node's neighbour pairs that are joined (Watts and Strogatz);
            a node with fewer than two neighbours counts 0.
        multigraph: transitivity with a reciprocated edge as two parallel ones: graph-tool's `global_clustering` of a
            directed graph, and so the figure of Lin et al. 2024.
        triangles: their number, reciprocity ignored.
    """

    transitivity: float
    local: float
    multigraph: float
    triangles: int


@dataclass(frozen=True)
class RichClub:
    """Density among the nodes of undirected degree above `degree`, beside that of degree-preserving random graphs.

    `ratio` is None where no random graph joins any two of these nodes.
    """

    degree: int
    nodes: int
    density: float
    random_density: float
    ratio: float | None


def density(adjacency: Adjacency, *, directed: bool) -> float:
    """Edges, or connected pairs, over the ordered, or unordered, pairs of distinct nodes."""
    graph = as_graph(adjacency)
    pairs = graph.nodes * (graph.nodes - 1)
    return (graph.edges if directed else graph.undirected.nnz) / pairs if pairs else 0.0


def reciprocity(adjacency: Adjacency) -> float:
    """Share of the edges i -> j whose j -> i is an edge; 0 without edges."""
    graph = as_graph(adjacency)
    return 2 - graph.undirected.nnz / graph.edges if graph.edges else 0.0


def components(adjacency: Adjacency, *, strong: bool) -> Components:
    """Strongly connected components of the directed graph, or weakly connected ones."""
    graph = as_graph(adjacency)
    count, labels = csgraph.connected_components(graph.adjacency, connection="strong" if strong else "weak")
    return Components(int(count), int(np.bincount(labels).max(initial=0)))


def compiled(nodes: int, pairs: np.ndarray) -> igraph.Graph:
    """igraph's form of an undirected graph, from its unordered pairs, int64 [E, 2]."""
    return igraph.Graph(nodes, edges=np.ascontiguousarray(pairs))


def edge_pairs(undirected: sparse.csr_array) -> np.ndarray:
    """int64 [E, 2]: the pairs i < j of a symmetric adjacency matrix."""
    upper = sparse.triu(undirected, 1, format="coo")
    return np.column_stack([upper.row, upper.col]).astype(np.int64)


def transitivity(undirected: igraph.Graph) -> float:
    """3 * triangles / connected triples; 0 where there is no triple."""
    return float(undirected.transitivity_undirected(mode="zero"))


def clustering(adjacency: Adjacency) -> Clustering:
    """All of `Clustering`."""
    graph = as_graph(adjacency)
    degree = np.diff(graph.undirected.indptr).astype(np.int64)
    around = degree * (degree - 1) // 2
    undirected = compiled(graph.nodes, edge_pairs(graph.undirected))
    local = np.array(undirected.transitivity_local_undirected(mode="zero"), dtype=np.float64)
    triangles = round(float(local @ around)) // 3
    triples = int(around.sum())
    return Clustering(
        transitivity=3 * triangles / triples if triples else 0.0,
        local=float(local.mean()) if len(local) else 0.0,
        multigraph=_multigraph_transitivity(graph, triangles),
        triangles=triangles,
    )


def _multigraph_transitivity(graph: Graph, triangles: int) -> float:
    """sum_vb U_vb (M M)_vb / sum_v k_v (k_v - 1): M counts the edges between two nodes, U = (M > 0), k = M 1.

    With M = U + R, R the reciprocated pairs, all terms but U U U, six times the triangles, run over pairs of R alone.
    """
    undirected: Any = graph.undirected
    both: Any = sparse.csr_array(graph.adjacency.multiply(graph.adjacency.T))
    degree = np.diff(undirected.indptr).astype(np.int64) + np.diff(both.indptr)
    pairs = edge_pairs(both)
    work = np.cumsum(np.diff(undirected.indptr)[pairs].sum(1, dtype=np.int64))
    closed = 6 * triangles
    for block in np.split(pairs, np.flatnonzero(np.diff(work // _BLOCK)) + 1):
        one, other = undirected[block[:, 0]], undirected[block[:, 1]]
        closed += 4 * int(one.multiply(other).sum(dtype=np.int64))
        closed += int(both[block[:, 0]].multiply(other).sum(dtype=np.int64))
        closed += int(one.multiply(both[block[:, 1]]).sum(dtype=np.int64))
    triples = int((degree * (degree - 1)).sum())
    return closed / triples if triples else 0.0


def rich_club_densities(pairs: np.ndarray, degree: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nodes of degree above each threshold, density among them), from unordered pairs [E, 2] and degrees [N]."""
    nodes = (degree[:, None] > thresholds).sum(0)
    weakest = np.sort(degree[pairs].min(axis=1))
    inside = len(weakest) - np.searchsorted(weakest, thresholds, side="right")
    return nodes, inside / np.maximum(nodes * (nodes - 1) // 2, 1)


def rich_club_thresholds(degree: np.ndarray) -> np.ndarray:
    """The degrees above which the top half, tenth, hundredth and thousandth of the nodes lie, at least two of them."""
    thresholds = np.unique(np.quantile(degree, [0.5, 0.9, 0.99, 0.999], method="inverted_cdf").astype(np.int64))
    return thresholds[(degree[:, None] > thresholds).sum(0) >= 2]
