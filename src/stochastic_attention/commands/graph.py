"""Measure a graph: a connectome (larva, larva-brain, worm, or a file) or an attention pattern's.

Prints nodes, edges, degrees, components, shortest paths, clustering, small-worldness and rich club, each with its
definition, and what of the input was left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import make_folder, require
from .options import split_list

_HELP = (
    "a graph is needed: `sattn graph larva` (or larva-brain, worm), `sattn graph EDGES` for a file (edge list, "
    "parquet, npz, mtx, GraphML), or `sattn graph --pattern sa`; `sattn graph --help` has all options"
)
_OF_FILES = ("min_synapses", "columns", "nodes")
_OF_PATTERNS = {"n": 4096, "window": 64, "layers": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "edges",
        nargs="?",
        metavar="EDGES",
        help="larva, larva-brain, worm, or a file: edge list (text, .gz), .parquet, .npz, .npy, .mtx, .graphml",
    )
    parser.add_argument("--min-synapses", type=float, help="least weight of a pair, summed over its rows")
    parser.add_argument("--columns", help="SOURCE,TARGET or SOURCE,TARGET,WEIGHT: names in the file's header")
    parser.add_argument("--nodes", type=int, help="nodes in all, where some have no edge in the file")
    parser.add_argument("--pattern", help="swa, sa, sa-block, sa-prefix, gated, ..., instead of EDGES")
    parser.add_argument("--n", type=int, help="tokens of the pattern's document (4096)")
    parser.add_argument("--window", type=int, help="of the pattern (64)")
    parser.add_argument("--layers", type=int, help="whose edges are united (4)")
    parser.add_argument("--sources", help="nodes to search shortest paths from, or all; by default all if in seconds")
    parser.add_argument("--nulls", type=int, default=3, help="random graphs drawn of each null model")
    parser.add_argument("--seed", type=int, default=0, help="of all that is sampled, and of the pattern")
    parser.add_argument("--output", type=Path, default=Path("results/graph"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Read or build the graph, measure it, print the report, write record.json and report.md."""
    require("scipy", "igraph", "tqdm", "pyarrow")
    from tqdm import tqdm

    from ..analysis.edges import PATTERNS
    from ..analysis.graph_files import read_graph
    from ..analysis.graph_report import measure, render, steps
    from ..analysis.pattern_graph import pattern_graph
    from ..ops.validation import check_choice, check_count, check_real
    from ..records import Environment, Record, write_text

    if (args.edges is None) == (args.pattern is None):
        raise ValueError(_HELP if args.edges is None else f"EDGES or --pattern, not both: got {args.edges!r} besides")
    for name in _OF_FILES if args.edges is None else _OF_PATTERNS:
        if getattr(args, name) is not None:
            raise ValueError(f"{name} has no meaning {'for --pattern' if args.edges is None else 'without --pattern'}")
    check_count("nulls", args.nulls, minimum=2)
    check_count("seed", args.seed, minimum=0)
    if args.min_synapses is not None:
        check_real("min_synapses", args.min_synapses, minimum=0)
    make_folder(args.output)
    began = time.perf_counter()
    if args.edges is not None:
        print(f"Reading {args.edges}", file=sys.stderr)
        columns = None if args.columns is None else split_list(args.columns)
        minimum = 0 if args.min_synapses is None else args.min_synapses
        graph = read_graph(args.edges, columns=columns, min_weight=minimum, nodes=args.nodes)
        title = args.edges
    else:
        check_choice("pattern", args.pattern, PATTERNS)
        for name, default in _OF_PATTERNS.items():
            setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
            check_count(name, getattr(args, name), minimum=1)
        graph = pattern_graph(PATTERNS[args.pattern](args.window), args.n, args.layers, seed=args.seed)
        title = f"{args.pattern}, {args.n:,} tokens"
    sources = source_count(args.sources, graph.nodes)
    with tqdm(total=steps(graph.nodes, graph.edges, sources, args.nulls), dynamic_ncols=True) as bar:
        report = measure(graph, sources=sources, samples=args.nulls, seed=args.seed, tick=bar.update)
    text = f"# {title}\n\n{render(report)}"
    skipped = ("command", "command_line", "output")
    config = {key: value for key, value in vars(args).items() if key not in skipped}
    results = {"seconds": time.perf_counter() - began, **report.plain()}
    Record(args.command_line, config, Environment.current(), results).save(args.output / "record.json")
    write_text(args.output / "report.md", text)
    print(text, end="")
    print(f"\nWritten: {args.output}/record.json, report.md")
    return 0


def source_count(text: str | None, nodes: int) -> int | None:
    """The number that --sources asks for, None where it was not given; ValueError for neither a count nor "all"."""
    if text is None:
        return None
    if text == "all":
        return nodes
    if not text.isdecimal() or not 2 <= int(text) <= nodes:  # one alone tells no error
        raise ValueError(f"sources must be all or an integer in [2, {nodes}], got {text!r}")
    return int(text)
