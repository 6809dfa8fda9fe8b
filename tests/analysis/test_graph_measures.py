"""Measures against graphs done by hand, and against definitions written out in loops."""

import itertools
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("igraph")
sparse = pytest.importorskip("scipy.sparse")

from stochastic_attention.analysis.edges import PATTERNS  # noqa: E402
from stochastic_attention.analysis.graph import Graph, as_graph  # noqa: E402
from stochastic_attention.analysis.graph_measures import (  # noqa: E402
    Components,
    clustering,
    components,
    density,
    reciprocity,
    rich_club_densities,
)
from stochastic_attention.analysis.pattern_graph import pattern_graph  # noqa: E402
from stochastic_attention.analysis.shortest_paths import default_sources, path_lengths  # noqa: E402


def make(nodes, edges):
    adjacency = np.zeros((nodes, nodes), dtype=bool)
    for source, target in edges:
        adjacency[source, target] = True
    return adjacency


RING = [(0, 1), (1, 2), (2, 0)]
SQUARE = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
BOTH_WAYS = [*RING, *((t, s) for s, t in RING)]


class ByHand(NamedTuple):
    nodes: int
    edges: list[tuple[int, int]]
    reciprocity: float
    clustering: tuple[float, float, float]  # transitivity, mean local, with parallel edges
    parts: tuple[int, int]  # strong, weak
    paths: tuple[float, float, float]  # directed: mean, efficiency, reachable share
    undirected_mean: float


BY_HAND = {
    "ring of three": ByHand(3, RING, 0, (1, 1, 1), (1, 1), (1.5, 0.75, 1), 1),
    # Every edge twice: a node's four edge ends make 12 ordered pairs, 4 of them to one neighbour; 8 / 12 close.
    "both ways": ByHand(3, BOTH_WAYS, 1, (1, 1, 2 / 3), (1, 1), (1, 1, 1), 1),
    "chain": ByHand(3, [(0, 1), (1, 2)], 0, (0, 0, 0), (3, 1), (4 / 3, 2.5 / 6, 0.5), 4 / 3),
    # Degrees 3, 3, 2, 2: two triangles, eight triples. Directed lengths: five 1, five 2, two 3.
    "square with a diagonal": ByHand(
        4, SQUARE, 0, (0.75, 5 / 6, 0.75), (1, 1), (21 / 12, (5 + 5 / 2 + 2 / 3) / 12, 1), 7 / 6
    ),
    "two parts and a node alone": ByHand(5, [(0, 1), (1, 0), (2, 3)], 2 / 3, (0, 0, 0), (4, 3), (1, 3 / 20, 3 / 20), 1),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_graphs_done_by_hand(name):
    hand = BY_HAND[name]
    graph = as_graph(make(hand.nodes, hand.edges))
    found = clustering(graph)
    assert density(graph, directed=True) == pytest.approx(len(hand.edges) / (hand.nodes * (hand.nodes - 1)))
    assert reciprocity(graph) == pytest.approx(hand.reciprocity)
    assert (found.transitivity, found.local, found.multigraph) == pytest.approx(hand.clustering)
    assert tuple(components(graph, strong=strong).count for strong in (True, False)) == hand.parts
    paths = path_lengths(graph, directed=True)
    assert paths.is_exact
    assert paths.mean.stderr == 0
    assert (paths.mean.value, paths.efficiency.value, paths.reachable.value) == pytest.approx(hand.paths)
    assert path_lengths(graph, directed=False).mean.value == pytest.approx(hand.undirected_mean)


def random_graph(nodes, share, seed):
    """Two parts without an edge between them, and some self loops."""
    adjacency = np.random.default_rng(seed).random((nodes, nodes)) < share
    adjacency[: nodes // 4, nodes // 4 :] = adjacency[nodes // 4 :, : nodes // 4] = False
    return adjacency


def lengths_by_hand(adjacency):
    """Shortest path lengths [N, N], inf where there is none, by Floyd and Warshall."""
    lengths = np.where(adjacency, 1.0, np.inf)
    np.fill_diagonal(lengths, 0)
    for middle in range(len(adjacency)):
        lengths = np.minimum(lengths, lengths[:, [middle]] + lengths[[middle]])
    return lengths


def clustering_by_hand(adjacency):
    """(transitivity, mean local, transitivity with parallel edges, triangles), pair by pair."""
    count = adjacency.astype(int) + adjacency.T
    np.fill_diagonal(count, 0)
    nodes = range(len(count))
    closed = triples = several_closed = several = 0
    local = []
    for v in nodes:
        around = [u for u in nodes if count[v, u]]
        joined = sum(count[a, b] > 0 for a, b in itertools.combinations(around, 2))
        pairs = len(around) * (len(around) - 1) // 2
        closed, triples = closed + joined, triples + pairs
        local.append(joined / pairs if pairs else 0)
        ends = [u for u in around for _ in range(count[v, u])]
        several += len(ends) * (len(ends) - 1)
        several_closed += sum(count[v, u] * count[u, w] * (count[v, w] > 0) for u in nodes for w in nodes)
    return closed / triples, np.mean(local), several_closed / several, closed // 3


@pytest.mark.parametrize(("nodes", "share"), [(40, 0.04), (65, 0.1), (80, 0.3)])
def test_random_graphs_against_loops(nodes, share):
    adjacency = random_graph(nodes, share, seed=nodes)
    found = clustering(adjacency)
    expected = clustering_by_hand(adjacency)
    assert (found.transitivity, found.local, found.multigraph, found.triangles) == pytest.approx(expected)
    for directed in (True, False):
        lengths = lengths_by_hand(adjacency if directed else adjacency | adjacency.T)
        between = ~np.eye(nodes, dtype=bool)
        reached = between & np.isfinite(lengths)
        paths = path_lengths(adjacency, directed=directed)
        assert paths.mean.value == pytest.approx(lengths[reached].mean())
        assert paths.efficiency.value == pytest.approx((1 / lengths[between]).mean())
        assert paths.reachable.value == pytest.approx(reached.sum() / between.sum())
        counts = np.bincount(lengths[reached].astype(int))
        assert paths.pairs_by_length == tuple(counts[1:])
        assert components(adjacency, strong=directed).count == len(
            {
                tuple(np.flatnonzero(np.isfinite(row) & np.isfinite(column)))
                for row, column in zip(lengths, lengths.T, strict=True)
            }
        )


@pytest.mark.parametrize("directed", [True, False])
def test_sampled_sources_lie_within_their_error(directed):
    adjacency = random_graph(400, 0.01, seed=1)
    exact = path_lengths(adjacency, directed=directed)
    misses = []
    for seed in range(20):
        paths = path_lengths(adjacency, directed=directed, sources=100, seed=seed)
        assert not paths.is_exact
        for name in ("mean", "efficiency", "reachable"):
            sampled, true = getattr(paths, name), getattr(exact, name)
            misses.append((sampled.value - true.value) / sampled.stderr)
    # Squared standard scores average 1; of 20 draws, three figures each, far from 0 and from 2.
    assert 0.4 < np.square(misses).mean() < 2


def test_a_sample_is_drawn_from_its_seed():
    adjacency = random_graph(300, 0.02, seed=2)
    one, same, other = (path_lengths(adjacency, directed=True, sources=65, seed=seed) for seed in (3, 3, 4))
    assert one == same != other


def test_few_nodes_are_searched_from_all_and_many_from_a_sample():
    assert default_sources(3554, 118433) == 3554
    assert default_sources(138584, 3732460) == 1024


FORMS = {
    "bool": lambda x: x,
    "float weights": lambda x: x * 0.25,
    "int": lambda x: x.astype(np.int32),
    "matrix": lambda x: np.asmatrix(x.astype(float)),
    "csr_array": sparse.csr_array,
    "csr_matrix": sparse.csr_matrix,
    "csc_array": lambda x: sparse.csc_array(x.astype(float)),
    "repeated entries": lambda x: sparse.coo_array(
        (np.ones(2 * x.sum()), tuple(np.tile(ends, 2) for ends in x.nonzero())), shape=x.shape
    ),
    "stored zeros": lambda x: sparse.csr_array((x.ravel() * 1, np.tile(np.arange(60), 60), np.arange(0, 3601, 60))),
    "torch bool": torch.from_numpy,
    "torch float": lambda x: torch.from_numpy(x).float(),
    "torch bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
    "torch sparse": lambda x: torch.from_numpy(x).half().to_sparse(),
    "half": lambda x: x.astype(np.float16),
    "graph": as_graph,
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_adjacency_gives_the_same(form):
    adjacency = random_graph(60, 0.1, seed=5)
    given = FORMS[form](adjacency.copy())
    assert as_graph(given).adjacency.toarray().tolist() == (adjacency & ~np.eye(60, dtype=bool)).astype(int).tolist()
    assert path_lengths(given, directed=True) == path_lengths(adjacency, directed=True)
    assert clustering(given) == clustering(adjacency)
    assert components(given, strong=True) == components(adjacency, strong=True)
    assert (density(given, directed=False), reciprocity(given)) == (
        density(adjacency, directed=False),
        reciprocity(adjacency),
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.ones((2, 3)), ValueError, r"adjacency must be square, got shape \(2, 3\)"),
        (np.ones(4), ValueError, r"adjacency must be square, got shape \(4,\)"),
        (torch.ones(1, 4, 4), ValueError, r"adjacency must be square, got shape \(1, 4, 4\)"),
        (np.array([[0, -1.0], [0, 0]]), ValueError, "adjacency must hold finite numbers >= 0"),
        (np.array([[0, np.nan], [0, 0]]), ValueError, "adjacency must hold finite numbers >= 0"),
        (np.ones((2, 2), dtype=complex), ValueError, "adjacency must hold bools or real numbers, got dtype complex128"),
        ([[0, 1], [1, 0]], TypeError, "adjacency must be a numpy, scipy.sparse or torch matrix, got list"),
        (np.ma.array(np.ones((2, 2))), TypeError, "adjacency must be .* matrix, got MaskedArray"),
    ],
)
def test_what_is_no_adjacency_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        path_lengths(given, directed=True)


def test_edges_must_fit_their_nodes():
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 2\), got values from 1 to 2"):
        Graph.from_edges(np.array([0, 0]), np.array([1, 2]), 2)
    with pytest.raises(ValueError, match="must have one length, got 2, 1 and 2"):
        Graph.from_edges(np.array([0, 0]), np.array([1]), 2)
    with pytest.raises(ValueError, match="weights must be finite and above 0"):
        Graph.from_edges(np.array([0]), np.array([1]), 2, weights=np.array([0.0]))
    for ids in ([0.5], [np.nan], ["0"], [True]):  # as pandas leaves a column that lacks a value
        with pytest.raises(ValueError, match="sources must be integers, got dtype"):
            Graph.from_edges(np.array(ids), np.array([1]), 2)
    with pytest.raises(ValueError, match=r"sources must lie in \[0, 2\)"):
        Graph.from_edges(np.array([2**64 - 1], dtype=np.uint64), np.array([1]), 2)
    with pytest.raises(ValueError, match=r"min_weight must be 0 for a Graph, .*got 5"):
        as_graph(Graph.from_edges(np.array([0]), np.array([1]), 2), min_weight=5)
    with pytest.raises(ValueError, match=r"sources must be an integer in \[1, 3\], got 4"):
        path_lengths(make(3, RING), directed=True, sources=4)


@pytest.mark.parametrize(
    "matrix",
    [
        sparse.coo_array((np.ones(256, np.uint8), ([0] * 256, [1] * 256)), shape=(2, 2)),
        torch.sparse_coo_tensor(
            [[0] * 256, [1] * 256], torch.ones(256, dtype=torch.int8), (2, 2), check_invariants=True
        ),
    ],
    ids=["scipy", "torch"],
)
def test_a_pair_may_stand_more_often_than_its_type_counts(matrix):
    graph = as_graph(matrix)
    assert (graph.edges, graph.tally.weight) == (1, 256)


def test_the_number_of_nodes_may_be_numpys():
    sources, targets = np.array([0, 3]), np.array([1, 2])
    assert Graph.from_edges(sources, targets, sources.max() + 1).nodes == 4


def test_a_graph_without_edges():
    empty = np.zeros((3, 3), dtype=bool)
    paths = path_lengths(empty, directed=True)
    assert (paths.mean, paths.efficiency.value, paths.reachable.value, paths.pairs_by_length) == (None, 0, 0, ())
    assert clustering(empty).transitivity == clustering(empty).multigraph == reciprocity(empty) == 0
    assert components(empty, strong=True) == Components(3, 1)


def test_rich_club_by_hand():
    # A triangle 0, 1, 2 whose corners carry one leaf each, and one leaf more on 0: degrees 4, 3, 3, 1, 1, 1, 1.
    pairs = np.array([(0, 1), (1, 2), (2, 0), (0, 3), (0, 4), (1, 5), (2, 6)])
    nodes, densities = rich_club_densities(pairs, np.bincount(pairs.ravel()), np.array([0, 1, 3]))
    assert nodes.tolist() == [7, 3, 1]
    assert densities.tolist() == pytest.approx([7 / 21, 1, 0])


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "moba"])
def test_a_pattern_graph_is_the_union_of_its_masks(name, layers):
    from dataclasses import replace

    n, pattern = 67, PATTERNS[name](6)
    graph = pattern_graph(pattern, n, layers, seed=7)
    seeded = replace(pattern, seed=7) if pattern.is_random else pattern
    union = torch.stack([seeded.dense_mask(n, layer=layer)[0] for layer in range(layers)]).any(0)
    assert graph.tally.self_loops == n
    union.fill_diagonal_(False)
    assert graph.adjacency.toarray().tolist() == union.T.int().tolist()
    assert f"union of {layers} causal layer" in graph.tally.notes[0]


def test_no_table_of_all_pairs():
    n = 50_000
    tracemalloc.start()
    graph = pattern_graph(PATTERNS["sa"](2), n, 2)
    path_lengths(graph, directed=False, sources=64)
    clustering(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One bit a pair would be 312 MB.
    assert peak < n**2 / 8 / 2
