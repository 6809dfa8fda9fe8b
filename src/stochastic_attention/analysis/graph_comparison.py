"""Several graphs side by side: their clustering and path lengths, raw and against random graphs."""

from __future__ import annotations

from collections.abc import Mapping

from ..plots import Scatter
from ..records import Estimate
from ..tables import markdown
from .graph_report import GraphReport, interval

_COLUMNS = (
    "graph | nodes | joined pairs | density | C | C / C_rand | L | L / L_rand | S | S, same degrees | omega | "
    "joined by a path | efficiency"
)


def render(reports: Mapping[str, GraphReport]) -> str:
    """A line a graph, and what the columns are."""
    rows: list[list[str]] = [[*_COLUMNS.split(" | ")]]
    for name, report in reports.items():
        world, paths = report.small_world, report.undirected_paths
        clustering_ratio, path_ratio = _ratios(report)
        rows.append(
            [
                name,
                f"{report.nodes:,}",
                f"{report.undirected_edges:,}",
                f"{report.undirected_density:.3g}",
                f"{report.clustering.transitivity:.4f}",
                "-" if clustering_ratio is None else f"{clustering_ratio:.3g}",
                interval(paths.mean, 3),
                "-" if path_ratio is None else f"{path_ratio:.3f}",
                interval(world.erdos_renyi.small_worldness, 2),
                interval(world.degree_preserving.small_worldness, 2),
                interval(world.omega, 3),
                interval(paths.reachable, 4),
                interval(paths.efficiency, 4),
            ]
        )
    notes = [
        "All on symmetrised graphs, without self loops. A pattern's graph: the union of its layers' causal edges.",
        "C: transitivity, 3 triangles / connected triples. L: mean shortest path over the pairs joined by a path.",
        "C_rand, L_rand: Erdos-Renyi graphs of as many nodes and edges. S = (C / C_rand) / (L / L_rand).",
        "S, same degrees: against degree-preserving random graphs. omega: 0 small world, 1 random, -1 lattice.",
        "efficiency: mean of 1 / shortest path over all pairs, 0 where there is none.",
        "± is a 95 % confidence interval of what is sampled; without ± a figure is exact, but for the two ratios.",
    ]
    return markdown(rows) + "\n" + "".join(f"- {note}\n" for note in notes)


def scatters(reports: Mapping[str, GraphReport]) -> list[Scatter]:
    """C over L, raw and against random graphs. A graph without a defined ratio is in neither."""
    raw, against_random = [], []
    for name, report in reports.items():
        ratios = _ratios(report)
        if ratios[0] and ratios[1] and report.undirected_paths.mean:
            raw.append((name, report.undirected_paths.mean.value, report.clustering.transitivity))
            against_random.append((name, ratios[1], ratios[0]))
    return [
        Scatter("as measured", "L, mean shortest path", "C, transitivity", raw),
        Scatter("against random graphs of as many edges", "L / L_rand", "C / C_rand", against_random, at_one=True),
    ]


def _ratios(report: GraphReport) -> tuple[float | None, float | None]:
    """(C / C_rand, L / L_rand) against Erdos-Renyi graphs."""
    null = report.small_world.erdos_renyi

    def ratio(own: float | None, drawn: Estimate | None) -> float | None:
        return None if own is None or drawn is None or not drawn.value else own / drawn.value

    path = report.undirected_paths.mean
    return ratio(report.clustering.transitivity, null.clustering), ratio(path.value if path else None, null.path)
