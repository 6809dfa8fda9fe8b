"""Compare brains and attention patterns as graphs: clustering and path lengths side by side.

The larva's brain and the worm come with the package; --fly adds the adult fly's from a FlyWire Codex download.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from . import make_folder, require
from .graph import source_count
from .options import split_list, split_numbers

if TYPE_CHECKING:
    from ..analysis.graph import Graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--fly", type=Path, help="edges of the adult fly, or any file that `sattn graph` reads")
    parser.add_argument("--min-synapses", type=float, help="least weight of one of the fly's pairs")
    parser.add_argument("--patterns", default="swa,sa,gated-half", help="comma-separated; gated-half: w/2 a path")
    parser.add_argument("--n", type=int, default=4096, help="tokens of the patterns' document")
    parser.add_argument("--window", type=int, default=16, help="of every pattern")
    parser.add_argument("--layers", default="1,4,16", help="whose edges are united, comma-separated")
    parser.add_argument("--sources", help="nodes to search shortest paths from, or all; by default all if in seconds")
    parser.add_argument("--nulls", type=int, default=5, help="random graphs drawn of each null model")
    parser.add_argument("--seed", type=int, default=0, help="of all that is sampled, and of the patterns")
    parser.add_argument("--output", type=Path, default=Path("results/graphs"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Measure each graph, then write record.json, table.md and plot.png, and print the table."""
    require("scipy", "igraph", "matplotlib", "pyarrow", "tqdm")
    from tqdm import tqdm

    from ..analysis.edges import PATTERNS
    from ..analysis.graph_comparison import render, scatters
    from ..analysis.graph_files import read_graph
    from ..analysis.graph_report import measure, steps
    from ..analysis.pattern_graph import pattern_graph
    from ..ops.validation import check_choice, check_count, check_distinct, check_real
    from ..plots import plot_scatters
    from ..records import Environment, Record, write_text

    names, layers = split_list(args.patterns), split_numbers("layers", args.layers)
    check_distinct("patterns", names)
    check_distinct("layers", layers)
    for name in names:
        check_choice("patterns", name, PATTERNS)
    for count in layers:
        check_count("layers", count, minimum=1)
    for option in ("n", "window"):
        check_count(option, getattr(args, option), minimum=1)
    check_count("nulls", args.nulls, minimum=2)
    check_count("seed", args.seed, minimum=0)
    if args.min_synapses is not None:
        if args.fly is None:
            raise ValueError("min_synapses has no meaning without --fly")
        check_real("min_synapses", args.min_synapses, minimum=0)
    make_folder(args.output)

    graphs: dict[str, Callable[[], Graph]] = {}
    if args.fly is not None:
        graphs["fly"] = lambda: read_graph(args.fly, min_weight=args.min_synapses or 0)
    for brain in ("larva-brain", "worm"):
        graphs[brain] = lambda brain=brain: read_graph(brain)
    for name in names:
        pattern = PATTERNS[name](args.window)
        for count in layers if pattern.is_random else (1,):  # layers that read the same keys add nothing
            graphs[f"{name}, {count} layer{'s' if count > 1 else ''}" if pattern.is_random else name] = (
                lambda pattern=pattern, count=count: pattern_graph(pattern, args.n, count, seed=args.seed)
            )

    reports = {}
    for name, build in graphs.items():
        graph = build()
        sources = source_count(args.sources, graph.nodes)
        with tqdm(desc=name, total=steps(graph.nodes, graph.edges, sources, args.nulls), dynamic_ncols=True) as bar:
            reports[name] = measure(graph, sources=sources, samples=args.nulls, seed=args.seed, tick=bar.update)
    table = render(reports)
    skipped = ("command", "command_line", "output")
    config = {key: str(value) if key == "fly" else value for key, value in vars(args).items() if key not in skipped}
    Record(
        args.command_line, config, Environment.current(), {name: report.plain() for name, report in reports.items()}
    ).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_scatters(scatters(reports), args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
