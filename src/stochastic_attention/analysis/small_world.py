"""Small-worldness: clustering and path length held against random graphs and a lattice.

Everything here is of the symmetrised graph. C is its transitivity, L its mean path length over reachable pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import igraph
import numpy as np

from ..ops.validation import check_count
from ..records import Estimate
from .graph import Adjacency, Graph, as_graph
from .graph_measures import (
    Clustering,
    RichClub,
    compiled,
    edge_pairs,
    rich_club_densities,
    rich_club_thresholds,
    transitivity,
)
from .shortest_paths import PathLengths, batches, default_sources, path_lengths

# Rounds of edge switching between two samples of the degree-preserving null; a round draws every edge once.
_ROUNDS = 5
# Sources of a random graph's path lengths, at most: its nodes are alike, so more would not tell.
_NULL_SOURCES = 1024


@dataclass(frozen=True)
class Null:
    """A random reference: its C and L, and (C / C_rand) / (L / L_rand) with the standard error of all that is sampled.

    `path` and `small_worldness` are None where they are not defined (no reachable pair, no clustering to divide by).
    """

    name: str
    clustering: Estimate
    path: Estimate | None
    small_worldness: Estimate | None


@dataclass(frozen=True)
class SmallWorld:
    """The graph's C and L against its references.

    Attributes:
        erdos_renyi: sampled graphs of as many nodes and edges.
        degree_preserving: sampled graphs of the same degrees, by edge switching from the graph itself.
        published: the definition of Lin et al. 2024 (Nature 634, 153): C with reciprocated edges counted twice
            (`Clustering.multigraph`) against the density 2m / (N (N - 1)), L against (ln N - gamma) / ln(2m / N) + 1/2
            (Fronczak et al. 2004), m the connected pairs.
        lattice_clustering: C of the ring lattice of as many nodes and edges.
        omega: L_rand / L - C / C_lattice (Telesford et al. 2011), L_rand of the degree-preserving null: near 0 for a
            small world, near 1 for a random graph, near -1 for a lattice. The lattice here keeps no degrees.
        rich_club: at rising degrees.
    """

    erdos_renyi: Null
    degree_preserving: Null
    published: Null
    lattice_clustering: float
    omega: Estimate | None
    rich_club: tuple[RichClub, ...]


def small_worldness(clustering: Estimate, path: Estimate, null_clustering: Estimate, null_path: Estimate) -> Estimate:
    """(C / C_rand) / (L / L_rand); the relative errors of the four add in squares, n is the smallest sample's."""
    value = (clustering.value / null_clustering.value) / (path.value / null_path.value)
    sampled = [x for x in (clustering, path, null_clustering, null_path) if x.stderr]
    relative = math.hypot(*((x.stderr or 0.0) / x.value for x in sampled))
    return Estimate(value, value * relative, min((x.n for x in sampled), default=path.n))


def erdos_renyi_path(nodes: int, edges: int) -> float | None:
    """Expected path length of a random graph of undirected edges, (ln N - gamma) / ln(k) + 1/2 with k = 2 edges / N.

    Fronczak, Fronczak and Holyst 2004 (Phys. Rev. E 70, 056110), for large sparse graphs; None for k <= 1.
    """
    mean_degree = 2 * edges / nodes
    return (math.log(nodes) - np.euler_gamma) / math.log(mean_degree) + 0.5 if mean_degree > 1 else None


def published_definition(nodes: int, edges: int, multigraph_clustering: float, path: Estimate | None) -> Null:
    """`SmallWorld.published` from the figures alone; `edges` are undirected."""
    clustering = Estimate(2 * edges / (nodes * (nodes - 1)), 0.0, 1)
    expected = erdos_renyi_path(nodes, edges)
    null_path = None if expected is None else Estimate(expected, 0.0, 1)
    return _null("Lin et al. 2024", Estimate(multigraph_clustering, 0.0, 1), path, clustering, null_path)


def null_steps(nodes: int, edges: int, samples: int) -> int:
    """How often `small_world` ticks."""
    return samples * (2 * batches(_null_sources(nodes, edges)) + 2) + 1


def small_world(
    adjacency: Adjacency,
    clustering: Clustering,
    paths: PathLengths,
    *,
    samples: int = 3,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> SmallWorld:
    """Draw the random graphs and hold the graph against them.

    Args:
        adjacency: see `as_graph`.
        clustering, paths: of the symmetrised graph.
        samples: graphs drawn of each null model. Their path lengths are from at most 1,024 sources each.
        seed: of everything drawn.
        tick: called `null_steps` times.
    """
    check_count("samples", samples, minimum=2)
    check_count("seed", seed, minimum=0)
    graph = as_graph(adjacency)
    n, m = graph.nodes, graph.undirected_edges
    own_clustering = Estimate(clustering.transitivity, 0.0, 1)
    own_pairs = edge_pairs(graph.undirected)
    own_degree = np.diff(graph.undirected.indptr).astype(np.int64)
    thresholds = rich_club_thresholds(own_degree)
    by_model: dict[str, list[tuple[float, PathLengths]]] = {"erdos-renyi": [], "degree-preserving": []}
    random_densities = []
    switched, generator = own_pairs, np.random.default_rng(seed)
    with _igraph_seeded(seed):
        for sample in range(samples):
            drawn = np.array(igraph.Graph.Erdos_Renyi(n, m=m).get_edgelist(), dtype=np.int64).reshape(-1, 2)
            tick()
            by_model["erdos-renyi"].append(_measure(n, drawn, sample, tick))
            switched = switch_edges(switched, n, _ROUNDS, generator)
            tick()
            by_model["degree-preserving"].append(_measure(n, switched, sample, tick))
            random_densities.append(rich_club_densities(switched, own_degree, thresholds)[1])
    nulls = {
        name: _null(name, own_clustering, paths.mean, _mean([c for c, _ in drawn]), _mean_path([p for _, p in drawn]))
        for name, drawn in by_model.items()
    }
    lattice = transitivity(compiled(n, ring_lattice(n, m)))
    tick()
    return SmallWorld(
        erdos_renyi=nulls["erdos-renyi"],
        degree_preserving=nulls["degree-preserving"],
        published=published_definition(n, m, clustering.multigraph, paths.mean),
        lattice_clustering=lattice,
        omega=_omega(paths.mean, nulls["degree-preserving"].path, clustering.transitivity, lattice),
        rich_club=_rich_club(own_pairs, own_degree, thresholds, np.mean(random_densities, axis=0)),
    )


def ring_lattice(nodes: int, edges: int) -> np.ndarray:
    """int64 [edges, 2]: a ring whose nodes join their nearest neighbours, the last distance as far as edges go."""
    check_count("edges", edges, minimum=0, maximum=nodes * (nodes - 1) // 2)
    place = np.arange(edges, dtype=np.int64)
    start = place % nodes
    return np.column_stack([start, (start + place // nodes + 1) % nodes])


def switch_edges(pairs: np.ndarray, nodes: int, rounds: int, generator: np.random.Generator) -> np.ndarray:
    """A random graph with the degrees of the one of unordered pairs [E, 2]: int64 [E, 2], no loop, no repeated pair.

    A round matches all edges two by two at random, and turns a-b, c-d into a-d, c-b, one of the two ways round at
    random. A match is left alone where a loop would arise, or where any other match holds or proposes one of its four
    pairs. That rule reads the same from either side of the switch, so every such graph is equally likely in the end.
    """
    first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
    half = len(pairs) // 2

    def key(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.minimum(one, other) * nodes + np.maximum(one, other)

    for _ in range(rounds if half else 0):
        order = generator.permutation(len(pairs))
        left, right, odd = order[:half], order[half : 2 * half], order[2 * half :]
        turn = generator.random(half) < 0.5
        a, b = first[left], second[left]
        c, d = np.where(turn, second[right], first[right]), np.where(turn, first[right], second[right])
        keys = [key(a, b), key(c, d), key(a, d), key(c, b)]
        ordered = np.sort(np.concatenate([*keys, key(first[odd], second[odd])]))
        clashing = ordered[1:][ordered[1:] == ordered[:-1]]
        free = (a != d) & (c != b)
        for pair in keys if len(clashing) else ():
            free &= clashing[np.searchsorted(clashing, pair).clip(max=len(clashing) - 1)] != pair
        second[left[free]] = d[free]
        first[right[free]], second[right[free]] = c[free], b[free]
    return np.column_stack([first, second])


def _null_sources(nodes: int, edges: int) -> int:
    return min(default_sources(nodes, edges), _NULL_SOURCES)


def _measure(nodes: int, pairs: np.ndarray, seed: int, tick: Callable[[], object]) -> tuple[float, PathLengths]:
    """(transitivity, path lengths) of the undirected graph of unordered pairs [E, 2]."""
    graph = Graph.from_edges(pairs[:, 0], pairs[:, 1], nodes)
    sources = _null_sources(nodes, graph.edges)
    paths = path_lengths(graph, directed=False, sources=sources, seed=seed, tick=tick)
    return transitivity(compiled(nodes, pairs)), paths


def _mean(values: list[float]) -> Estimate:
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values))), len(values))


def _mean_path(drawn: list[PathLengths]) -> Estimate | None:
    lengths = [paths.mean.value for paths in drawn if paths.mean is not None]
    return _mean(lengths) if len(lengths) > 1 else None


def _null(name: str, clustering: Estimate, path: Estimate | None, null: Estimate, null_path: Estimate | None) -> Null:
    if path is None or null_path is None or not null.value:
        return Null(name, null, null_path, None)
    return Null(name, null, null_path, small_worldness(clustering, path, null, null_path))


def _omega(path: Estimate | None, null_path: Estimate | None, clustering: float, lattice: float) -> Estimate | None:
    if path is None or null_path is None or not lattice:
        return None
    ratio = null_path.value / path.value
    relative = math.hypot((path.stderr or 0.0) / path.value, (null_path.stderr or 0.0) / null_path.value)
    return Estimate(ratio - clustering / lattice, ratio * relative, null_path.n)


def _rich_club(
    pairs: np.ndarray, degree: np.ndarray, thresholds: np.ndarray, random_densities: np.ndarray
) -> tuple[RichClub, ...]:
    nodes, densities = rich_club_densities(pairs, degree, thresholds)
    return tuple(
        RichClub(int(k), int(count), float(own), float(drawn), float(own / drawn) if drawn else None)
        for k, count, own, drawn in zip(thresholds, nodes, densities, random_densities, strict=True)
    )


@contextmanager
def _igraph_seeded(seed: int) -> Iterator[None]:
    """igraph draws from a generator of its own meanwhile, and from Python's, its default, afterwards."""
    igraph.set_random_number_generator(random.Random(seed))  # type: ignore[arg-type]
    try:
        yield
    finally:
        igraph.set_random_number_generator(random)  # type: ignore[arg-type]
