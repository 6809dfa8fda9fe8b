"""Null models, small-worldness and omega."""

import math
import random

import numpy as np
import pytest

pytest.importorskip("igraph")
pytest.importorskip("scipy")

from stochastic_attention.analysis.graph import Graph
from stochastic_attention.analysis.graph_measures import clustering, compiled, edge_pairs, transitivity
from stochastic_attention.analysis.graph_report import measure, steps
from stochastic_attention.analysis.shortest_paths import path_lengths
from stochastic_attention.analysis.small_world import (
    null_steps,
    published_definition,
    ring_lattice,
    small_world,
    small_worldness,
    switch_edges,
)
from stochastic_attention.records import Estimate


def undirected(nodes, pairs):
    return Graph.from_edges(pairs[:, 0], pairs[:, 1], nodes)


def small_world_graph(nodes, edges, rewired, seed=0):
    """A ring lattice with a share of its pairs thrown away for random ones."""
    generator = np.random.default_rng(seed)
    pairs = ring_lattice(nodes, edges)
    moved = generator.random(edges) < rewired
    pairs[moved] = generator.integers(0, nodes, (int(moved.sum()), 2))
    return undirected(nodes, pairs)


def test_the_published_figures_of_the_adult_fly():
    """Lin et al. 2024, FlyWire v630, at least 5 synapses: from their counts to their small-worldness."""
    nodes, edges, reciprocated = 127_319, 2_613_129, 0.13837740119221056
    joined = round(edges * (1 - reciprocated / 2))
    assert edges / (nodes * (nodes - 1)) == pytest.approx(0.000161205, abs=5e-10)
    null = published_definition(nodes, joined, 0.04632866099163119, Estimate(3.906096746643617, 0.0, nodes))
    assert null.clustering.value == pytest.approx(0.0003001023977)
    assert null.path is not None
    assert null.path.value == pytest.approx(3.56809446, abs=2e-6)
    assert null.small_worldness is not None
    assert null.small_worldness.value == pytest.approx(141.018, abs=1e-3)


@pytest.mark.parametrize(("nodes", "edges"), [(7, 21), (8, 28), (8, 26), (9, 0), (50, 100), (50, 117)])
def test_a_ring_lattice_has_its_edges_once_and_the_nearest_first(nodes, edges):
    pairs = ring_lattice(nodes, edges)
    assert len({frozenset(pair) for pair in pairs.tolist()}) == edges
    assert all(len(set(pair)) == 2 for pair in pairs.tolist())
    apart = (pairs[:, 1] - pairs[:, 0]) % nodes
    assert np.minimum(apart, nodes - apart).tolist() == sorted(np.minimum(apart, nodes - apart).tolist())


@pytest.mark.parametrize("half", [1, 2, 5])
def test_a_ring_lattice_has_the_clustering_of_watts_and_strogatz(half):
    degree = 2 * half
    expected = 3 * (degree - 2) / (4 * (degree - 1))
    assert transitivity(compiled(60, ring_lattice(60, 60 * half))) == pytest.approx(expected)


@pytest.mark.parametrize("edges", [0, 1, 2, 3, 500, 1201])
def test_switching_keeps_degrees_and_makes_no_loop_or_repeated_pair(edges):
    pairs = ring_lattice(60, edges) if edges <= 3 else edge_pairs(small_world_graph(60, edges, 0.5).undirected)
    switched = switch_edges(pairs, 60, 20, np.random.default_rng(0))
    assert np.bincount(switched.ravel(), minlength=60).tolist() == np.bincount(pairs.ravel(), minlength=60).tolist()
    assert (switched[:, 0] != switched[:, 1]).all()
    assert len({frozenset(pair) for pair in switched.tolist()}) == len(pairs)


def test_switching_reaches_every_graph_of_these_degrees_alike():
    # Degrees 2, 2, 2, 1, 1: on five nodes these are the 6 paths from 3 to 4, and the edge 3-4 with the triangle.
    pairs, generator = np.array([(3, 0), (0, 1), (1, 2), (2, 4)]), np.random.default_rng(1)
    drawn = {}
    for _ in range(7 * 200):
        pairs = switch_edges(pairs, 5, 10, generator)
        found = frozenset(frozenset(pair) for pair in pairs.tolist())
        drawn[found] = drawn.get(found, 0) + 1
    assert len(drawn) == 7
    # Chi-squared with 6 degrees of freedom: above 27.9 once in ten thousand seeds.
    assert sum((count - 200) ** 2 / 200 for count in drawn.values()) < 28


def test_random_graphs_are_what_they_are_called():
    graph = small_world_graph(500, 3000, 0.1)
    paths = path_lengths(graph, directed=False)
    world = small_world(graph, clustering(graph), paths, samples=8, seed=1)
    share = graph.undirected_edges / (500 * 499 / 2)
    drawn = world.erdos_renyi.clustering
    assert drawn.n == 8
    assert abs(drawn.value - share) < 5 * drawn.stderr
    assert world.erdos_renyi.path.value == pytest.approx(world.published.path.value, rel=0.03)
    for null in (world.erdos_renyi, world.degree_preserving):
        ratio = (clustering(graph).transitivity / null.clustering.value) / (paths.mean.value / null.path.value)
        assert null.small_worldness.value == pytest.approx(ratio)
        assert null.small_worldness.value > 10
    assert world.rich_club


@pytest.mark.parametrize(("rewired", "low", "high"), [(0.0, -1, -0.6), (0.1, -0.4, 0.4), (1.0, 0.8, 1.1)])
def test_omega_tells_lattice_small_world_and_random_graph_apart(rewired, low, high):
    report = measure(small_world_graph(600, 3000, rewired), samples=2)
    assert low < report.small_world.omega.value < high


def test_errors_add_as_relative_squares():
    def estimate(value, stderr, n):
        return Estimate(value, stderr, n)

    result = small_worldness(
        estimate(0.4, 0.0, 1), estimate(3.0, 0.03, 50), estimate(0.1, 0.002, 5), estimate(2.0, 0, 5)
    )
    assert result.value == pytest.approx((0.4 / 0.1) / (3.0 / 2.0))
    assert result.stderr == pytest.approx(result.value * math.hypot(0.01, 0.02))
    assert result.n == 5


def test_ratios_that_are_not_defined_are_none():
    star = np.column_stack([np.zeros(9, int), np.arange(1, 10)])
    report = measure(undirected(40, star), samples=2)
    assert report.clustering.transitivity == 0
    # Neither a star's switched graphs nor, here, the lattice have a triangle to divide by.
    assert report.small_world.degree_preserving.small_worldness is None
    assert report.small_world.omega is None


def test_one_seed_is_one_report_and_no_other_chance_is_touched():
    graph = small_world_graph(300, 1200, 0.2)
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    one, same, other = (measure(graph, sources=100, samples=2, seed=seed) for seed in (0, 0, 1))
    assert one == same != other
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state


@pytest.mark.parametrize(("nodes", "sources"), [(200, None), (200, 70)])
def test_progress_ends_where_it_said(nodes, sources):
    graph, ticks = small_world_graph(nodes, 600, 0.2), []
    measure(graph, sources=sources, samples=3, tick=lambda: ticks.append(1))
    assert len(ticks) == steps(graph.nodes, graph.edges, sources, 3)
    assert null_steps(graph.nodes, graph.edges, 3) < len(ticks)


def test_what_has_no_edge_or_too_few_samples_is_refused():
    with pytest.raises(ValueError, match="must have two nodes and an edge between them, got 3 nodes and 0 edges"):
        measure(np.eye(3))
    with pytest.raises(ValueError, match="samples must be an integer >= 2, got 1"):
        measure(small_world_graph(50, 100, 0.2), samples=1)
