"""Mixing: how fast layers of uniform weights forget where they started.

A layer that gives every key of N(i) the same weight is a Markov chain on tokens, P[i, j] = 1 / abs(N(i)) for j in N(i),
and a stack of layers is the product of theirs. Bidirectional throughout: a causal chain ends in token 0. All products
are of sparse matrices with vectors; nothing is n x n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh, svds

from ..ops.pattern import Pattern
from ..ops.validation import check_count
from .edges import adjacency, layer_edges


def transition(pattern: Pattern, n: int, *, layer: int) -> csr_array:
    """The row-stochastic matrix [n, n] of one bidirectional layer, float64."""
    seen = adjacency(layer_edges(pattern, n, layer=layer, causal=False))
    degree = np.diff(seen.indptr)
    return csr_array((1 / np.repeat(degree, degree), seen.indices, seen.indptr), shape=(n, n))


def spectral_gap(matrix: csr_array) -> float:
    """1 - abs(second eigenvalue) of the chain that goes to each neighbour with equal chance, of a symmetric relation.

    Only the places of `matrix` [n, n] are read: the eigenvalues are those of D^(-1/2) A D^(-1/2), symmetric, A the
    relation and D its degrees. n must be at least 3.
    """
    degree = np.diff(matrix.indptr)
    n = len(degree)
    check_count("n", n, minimum=3)
    weights = 1 / np.sqrt(np.repeat(degree, degree) * degree[matrix.indices])
    symmetric = csr_array((weights, matrix.indices, matrix.indptr), shape=(n, n))
    values = eigsh(symmetric, k=2, which="LM", v0=_start(n), return_eigenvectors=False)
    return max(0.0, float(1 - np.abs(values).min()))  # rounding may pass 1 where the graph falls apart


def ring_gap(n: int, window: int) -> float:
    """`spectral_gap` of `window` steps to either side on a ring of n tokens, exact; n >= 2 * window + 1.

    The eigenvalues are (1 + 2 * sum over s = 1..window of cos(2 pi m s / n)) / (2 * window + 1), m = 0..n - 1.
    """
    return 1 - float(np.abs(_circle(n, window)[1:]).max())


def path_gap(n: int, window: int) -> float:
    """As `ring_gap` on a path whose ends reflect, exact: half of a ring of 2 n.

    A sliding window cuts its keys off at the ends instead, and so comes a little slower there.
    """
    return 1 - float(np.abs(_circle(2 * n, window)[1:n]).max())


def path_mixing_time(n: int, window: int) -> float:
    """Layers until total variation is 1/4 on the path of `path_gap`, by its slowest mode alone.

    From an end, the distance to uniform is about 2 / pi * (1 - gap)^k.
    """
    return math.log(8 / math.pi) / -math.log1p(-path_gap(n, window))


def kept(layers: Sequence[csr_array]) -> float:
    """The largest factor by which the product of layers keeps the length of a zero-mean vector over tokens.

    The norm of Q P_1 P_2 ... P_k Q, where Q takes the mean off. 0: everything but the mean is forgotten.
    """
    product = _OffTheMean(layers)
    start = _start(product.n)
    if np.linalg.norm(product.matvec(start)) <= product.n * np.finfo(np.float64).eps * np.linalg.norm(start):
        return 0.0  # where every token sees all, and the solver would have nothing to begin with
    (largest,) = np.asarray(svds(product, k=1, v0=start, return_singular_vectors=False))
    return float(largest)


class _OffTheMean(LinearOperator):
    """Q P_1 P_2 ... P_k Q of `kept`, as scipy's solvers take it."""

    def __init__(self, layers: Sequence[csr_array]) -> None:
        self.layers = layers
        self.n = len(layers[0].indptr) - 1
        super().__init__(np.dtype(np.float64), (self.n, self.n))

    def _matvec(self, x: NDArray) -> NDArray:
        x = x - x.mean(axis=0)
        for matrix in reversed(self.layers):
            x = matrix @ x
        return x - x.mean(axis=0)

    def _rmatvec(self, x: NDArray) -> NDArray:
        x = x - x.mean(axis=0)
        for matrix in self.layers:
            x = matrix.T @ x
        return x - x.mean(axis=0)


def distances(pattern: Pattern, n: int, starts: NDArray[np.int64], *, level: float, limit: int) -> list[float]:
    """Total variation after 1, 2, ... layers, until it is at most `level` or `limit` layers have passed.

    The walk's step k goes through layer k. The distance is the largest over `starts` [S] between the law of a walk from
    there and the law from a uniform start: layers that differ have no stationary law in common.
    """
    check_count("limit", limit, minimum=1)
    laws = np.full((n, len(starts) + 1), 1 / n)
    laws[:, :-1] = 0.0
    laws[starts, np.arange(len(starts))] = 1.0
    found: list[float] = []
    step = None
    while len(found) < limit and (not found or found[-1] > level):
        if step is None or pattern.is_random:
            step = transition(pattern, n, layer=len(found)).T.tocsr()
        laws = step @ laws
        found.append(float(np.abs(laws[:, :-1] - laws[:, -1:]).sum(axis=0).max() / 2))
    return found


def _circle(n: int, window: int) -> NDArray[np.float64]:
    """The eigenvalues of `ring_gap`, m = 0..n - 1."""
    check_count("window", window, minimum=1)
    check_count("n", n, minimum=2 * window + 1)
    weights = np.zeros(n)
    weights[np.arange(-window, window + 1)] = 1 / (2 * window + 1)
    return np.fft.fft(weights).real


def _start(n: int) -> NDArray[np.float64]:
    """The vector that iterations begin with: fixed, so that results repeat, and of no symmetry."""
    return np.random.default_rng(0).normal(size=n)
