"""A directed graph as a sparse adjacency matrix, and a tally of what was left out when it was made.

N nodes; entry [i, j] of an adjacency matrix is the edge i -> j.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse

from ..ops.validation import check_count, check_real, plain_number

# Node pairs are told apart by one int64, source * N + target.
_MOST_NODES = 2**31 - 1


@dataclass(frozen=True)
class Tally:
    """What was given and what was left out.

    Attributes:
        rows: edges given, repeated ones and self loops among them.
        repeated: rows whose pair another row holds already; their weights are summed.
        below_threshold: pairs whose summed weight is under `min_weight`.
        self_loops: pairs i -> i that reach the threshold; no measure counts them.
        min_weight: the threshold.
        weight: summed weight of the pairs that reach the threshold, self loops included.
        notes: what else a reader should know, a sentence each.
    """

    rows: int
    repeated: int
    below_threshold: int
    self_loops: int
    min_weight: float
    weight: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A directed graph without self loops or repeated edges.

    Attributes:
        adjacency: int8 [N, N] in rows, 1 for an edge, sorted column indices.
        tally: what was left out.
    """

    adjacency: sparse.csr_array
    tally: Tally

    @classmethod
    def from_edges(
        cls,
        sources: np.ndarray,
        targets: np.ndarray,
        nodes: int,
        *,
        weights: np.ndarray | None = None,
        min_weight: float = 0,
        notes: tuple[str, ...] = (),
    ) -> Graph:
        """Sum the weights of each pair and keep the pairs that reach `min_weight`.

        Args:
            sources, targets: integers [E] in [0, nodes).
            nodes: N; nodes without an edge stay in the graph.
            weights: finite numbers above 0 [E], such as synapse counts; every row counts 1 where None.
            min_weight: keep a pair whose summed weight is at least this; 0 keeps all.
            notes: kept in the tally.
        """
        nodes = plain_number(nodes)
        check_count("nodes", nodes, minimum=0, maximum=_MOST_NODES)
        check_real("min_weight", min_weight, minimum=0)
        sources, targets = np.asarray(sources), np.asarray(targets)
        weights = np.ones(len(sources)) if weights is None else np.asarray(weights, np.float64)
        if not len(sources) == len(targets) == len(weights):
            raise ValueError(
                "sources, targets and weights must have one length, "
                f"got {len(sources)}, {len(targets)} and {len(weights)}"
            )
        for name, ends in (("sources", sources), ("targets", targets)):
            if len(ends) and ends.dtype.kind not in "iu":
                raise ValueError(f"{name} must be integers, got dtype {ends.dtype}")
            if len(ends) and not 0 <= ends.min() <= ends.max() < nodes:
                raise ValueError(f"{name} must lie in [0, {nodes}), got values from {ends.min()} to {ends.max()}")
        sources, targets = sources.astype(np.int64), targets.astype(np.int64)
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError("weights must be finite and above 0")
        pairs = sparse.coo_array((weights, (sources, targets)), shape=(nodes, nodes)).tocsr()
        kept = pairs.data >= min_weight
        row = np.repeat(np.arange(nodes), np.diff(pairs.indptr))
        loop = kept & (row == pairs.indices)
        edge = kept & ~loop
        ones = np.ones(np.count_nonzero(edge), np.int8)
        adjacency = sparse.csr_array((ones, (row[edge], pairs.indices[edge])), shape=(nodes, nodes))
        adjacency.sort_indices()
        tally = Tally(
            rows=len(sources),
            repeated=len(sources) - pairs.nnz,
            below_threshold=pairs.nnz - int(np.count_nonzero(kept)),
            self_loops=int(np.count_nonzero(loop)),
            min_weight=float(min_weight),
            weight=float(pairs.data[kept].sum()),
            notes=notes,
        )
        return cls(adjacency, tally)

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.adjacency.indptr) - 1

    @property
    def edges(self) -> int:
        """Directed edges."""
        return self.adjacency.nnz

    @cached_property
    def undirected(self) -> sparse.csr_array:
        """The symmetrised graph: int8 [N, N], 1 where an edge goes either way, both entries stored."""
        both = sparse.csr_array(self.adjacency + self.adjacency.T)
        both.data[:] = 1
        both.sort_indices()
        return both

    @property
    def undirected_edges(self) -> int:
        """Connected pairs."""
        return self.undirected.nnz // 2


Adjacency = Graph | np.ndarray | sparse.sparray | sparse.spmatrix | torch.Tensor


def as_graph(adjacency: Adjacency, *, min_weight: float = 0) -> Graph:
    """The graph of a square matrix whose entry [i, j] is the weight of the edge i -> j, 0 (or False) for none.

    Args:
        adjacency: numpy array or matrix, scipy.sparse array or matrix, torch tensor, of bools or numbers >= 0; a
            `Graph` is returned as it is.
        min_weight: leave out entries below this.
    """
    if isinstance(adjacency, Graph):
        if min_weight:
            raise ValueError(f"min_weight must be 0 for a Graph, whose pairs are chosen already, got {min_weight}")
        return adjacency
    matrix: Any = _matrix_of(adjacency) if isinstance(adjacency, torch.Tensor) else adjacency
    is_array = isinstance(matrix, np.ndarray) and not isinstance(matrix, np.ma.MaskedArray)
    if not is_array and not sparse.issparse(matrix):
        raise TypeError(f"adjacency must be a numpy, scipy.sparse or torch matrix, got {type(matrix).__name__}")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"adjacency must be square, got shape {tuple(matrix.shape)}")
    if matrix.dtype.kind not in "biuf":
        raise ValueError(f"adjacency must hold bools or real numbers, got dtype {matrix.dtype}")
    if matrix.dtype == np.float16:  # which scipy.sparse has not
        matrix = matrix.astype(np.float32)
    entries: Any = sparse.coo_array(matrix).astype(np.float64)  # small integers overflow where a pair stands often
    entries.sum_duplicates()
    entries.eliminate_zeros()
    weights = entries.data
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError("adjacency must hold finite numbers >= 0, got others among them")
    return Graph.from_edges(entries.row, entries.col, entries.shape[0], weights=weights, min_weight=min_weight)


def _matrix_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401  # numpy or scipy.sparse
    tensor = tensor.detach().cpu()
    if tensor.layout == torch.strided:
        small = tensor.is_floating_point() and tensor.itemsize < 4  # some of these are no dtype of numpy
        return (tensor.float() if small else tensor).numpy()
    if not tensor.is_complex():
        tensor = tensor.double()
    entries = tensor.to_sparse_coo().coalesce()
    return sparse.coo_array((entries.values().numpy(), tuple(entries.indices().numpy())), shape=tuple(tensor.shape))
