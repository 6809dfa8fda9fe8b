"""All measures of one graph, and the report that says what each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..records import Estimate
from ..tables import markdown
from .graph import Adjacency, Tally, as_graph
from .graph_measures import (
    Clustering,
    Components,
    Degrees,
    clustering,
    components,
    density,
    reciprocity,
)
from .shortest_paths import PathLengths, batches, default_sources, path_lengths
from .small_world import Null, SmallWorld, null_steps, small_world


@dataclass(frozen=True)
class GraphReport:
    """What `measure` found. `paths` along the edges, `undirected_paths` and all below it on the symmetrised graph."""

    tally: Tally
    nodes: int
    edges: int
    density: float
    reciprocity: float
    in_degree: Degrees
    out_degree: Degrees
    isolated: int
    strong: Components
    weak: Components
    paths: PathLengths
    undirected_edges: int
    undirected_density: float
    undirected_degree: Degrees
    undirected_paths: PathLengths
    clustering: Clustering
    small_world: SmallWorld

    def plain(self) -> dict[str, Any]:
        """Plain data, for a record."""
        return asdict(self)


def steps(nodes: int, edges: int, sources: int | None, samples: int) -> int:
    """How often `measure` ticks."""
    sources = default_sources(nodes, edges) if sources is None else sources
    return 2 * batches(sources) + 1 + null_steps(nodes, edges, samples)


def measure(
    adjacency: Adjacency,
    *,
    sources: int | None = None,
    samples: int = 3,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> GraphReport:
    """Measure everything.

    Args:
        adjacency: see `as_graph`.
        sources: nodes whose shortest paths are searched; None: all where that takes seconds, else 1,024.
        samples: random graphs drawn of each null model.
        seed: of all that is sampled.
        tick: called `steps` times.
    """
    graph = as_graph(adjacency)
    if graph.nodes < 2 or not graph.edges:
        raise ValueError(
            f"the graph must have two nodes and an edge between them, got {graph.nodes} nodes and {graph.edges} edges"
        )
    paths = path_lengths(graph, directed=True, sources=sources, seed=seed, tick=tick)
    undirected_paths = path_lengths(graph, directed=False, sources=sources, seed=seed, tick=tick)
    clusters = clustering(graph)
    tick()
    degree = np.diff(graph.undirected.indptr)
    return GraphReport(
        tally=graph.tally,
        nodes=graph.nodes,
        edges=graph.edges,
        density=density(graph, directed=True),
        reciprocity=reciprocity(graph),
        in_degree=Degrees.of(np.bincount(graph.adjacency.indices, minlength=graph.nodes)),
        out_degree=Degrees.of(np.diff(graph.adjacency.indptr)),
        isolated=int((degree == 0).sum()),
        strong=components(graph, strong=True),
        weak=components(graph, strong=False),
        paths=paths,
        undirected_edges=graph.undirected_edges,
        undirected_density=density(graph, directed=False),
        undirected_degree=Degrees.of(degree),
        undirected_paths=undirected_paths,
        clustering=clusters,
        small_world=small_world(graph, clusters, undirected_paths, samples=samples, seed=seed, tick=tick),
    )


def render(report: GraphReport) -> str:
    """The report as Markdown lists and tables, each figure with its definition."""
    r, tally, world = report, report.tally, report.small_world
    lines = [
        "## As given",
        "",
        f"- rows: {tally.rows:,}; repeating a pair: {tally.repeated:,}, summed",
        f"- pairs left out below a weight of {tally.min_weight:g}: {tally.below_threshold:,}",
        f"- self loops, left out of all that follows: {tally.self_loops:,}",
        f"- pairs kept: {tally.self_loops + r.edges:,}, self loops included; their weight: {tally.weight:,.10g}",
        *(f"- {note}" for note in tally.notes),
        "",
        "## Directed graph",
        "",
        f"- nodes: {r.nodes:,}, {r.isolated:,} of them without an edge",
        f"- edges: {r.edges:,}",
        f"- density, edges / (N (N - 1)): {r.density:.6g}",
        f"- reciprocity, share of edges whose reverse is an edge: {r.reciprocity:.5f}",
        f"- in-degree: {_degrees(r.in_degree)}",
        f"- out-degree: {_degrees(r.out_degree)}",
        f"- strongly connected components: {r.strong.count:,}, the largest of {r.strong.largest:,} nodes",
        f"- weakly connected components: {r.weak.count:,}, the largest of {r.weak.largest:,} nodes",
        *_paths(r.paths),
        "",
        "## Symmetrised graph: a pair is joined where an edge goes either way",
        "",
        f"- joined pairs: {r.undirected_edges:,}, density {r.undirected_density:.6g}",
        f"- degree: {_degrees(r.undirected_degree)}",
        *_paths(r.undirected_paths),
        f"- clustering C, transitivity, 3 triangles / connected triples: {r.clustering.transitivity:.6f}"
        f" ({r.clustering.triangles:,} triangles)",
        f"- mean local clustering (Watts and Strogatz; fewer than two neighbours count 0): {r.clustering.local:.6f}",
        f"- transitivity with reciprocated edges as two parallel ones (Lin et al. 2024): {r.clustering.multigraph:.6f}",
        "",
        "## Against random graphs",
        "",
        "S = (C / C_rand) / (L / L_rand). Lin et al. 2024: their C, an Erdos-Renyi graph's density and expected L.",
        "",
        markdown(
            [["null model", "graphs", "C_rand", "L_rand", "S"]]
            + [_null_row(null) for null in (world.erdos_renyi, world.degree_preserving, world.published)]
        ),
        f"- omega, L_rand / L - C / C_lattice (L_rand degree-preserving; C_lattice {world.lattice_clustering:.5f}, of a"
        f" ring lattice with as many edges): {interval(world.omega, 4)}",
        "",
        "Rich club: density among the nodes of degree above k, over that of degree-preserving random graphs.",
        "",
        markdown(
            [["k", "nodes", "density", "random", "ratio"]]
            + [
                [
                    f"{club.degree:,}",
                    f"{club.nodes:,}",
                    f"{club.density:.4g}",
                    f"{club.random_density:.4g}",
                    "-" if club.ratio is None else f"{club.ratio:.3f}",
                ]
                for club in world.rich_club
            ]
        ),
        "± is a 95 % confidence interval (Student's t over what was sampled); a figure without ± is exact.",
    ]
    return "\n".join(lines) + "\n"


def interval(estimate: Estimate | None, digits: int) -> str:
    """The value, and half its 95 % confidence interval where it is sampled (Student's t, n - 1 degrees of freedom)."""
    if estimate is None:
        return "undefined"
    text = f"{estimate.value:.{digits}f}"
    if not estimate.stderr:
        return text
    return f"{text} ± {stdtrit(estimate.n - 1, 0.975) * estimate.stderr:.{digits}f}"


def _degrees(degrees: Degrees) -> str:
    return (
        f"mean {degrees.mean:.2f}, standard deviation {degrees.deviation:.2f}, "
        f"median {degrees.median:g}, maximum {degrees.most:,}"
    )


def _paths(paths: PathLengths) -> list[str]:
    how = (
        f"exact, from all {paths.nodes:,} nodes"
        if paths.is_exact
        else f"sampled, from {paths.sources:,} of {paths.nodes:,} nodes"
    )
    longest = f"; the longest: {len(paths.pairs_by_length)}" if paths.pairs_by_length else ""
    return [
        f"- pairs joined by a path: {interval(paths.reachable, 5)} of all",
        f"- mean shortest path L over these pairs: {interval(paths.mean, 4)} ({how}){longest}",
        f"- efficiency, mean of 1 / length over all pairs, 0 where there is no path: {interval(paths.efficiency, 5)}",
    ]


def _null_row(null: Null) -> list[str]:
    drawn = str(null.clustering.n) if null.clustering.n > 1 else "expected"
    return [null.name, drawn, interval(null.clustering, 6), interval(null.path, 4), interval(null.small_worldness, 3)]
