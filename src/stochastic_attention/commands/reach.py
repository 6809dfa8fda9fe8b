"""Measure receptive fields of attention patterns layer by layer, beside the closed forms."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from . import make_folder, require
from .options import split_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--n", type=int, default=32768, help="tokens")
    parser.add_argument("--window", type=int, default=256, help="of every pattern")
    parser.add_argument("--layers", type=int, default=12, help="depth of the stack")
    parser.add_argument(
        "--patterns",
        default="full,swa,sa,sa-block,sa-prefix,sa-prefix-block,gated,gated-half,moba",
        help="comma-separated; gated: the union of SA's and SWA's keys, gated-half: at half the window each",
    )
    parser.add_argument("--bidirectional", action="store_true", help="queries see both ways (not prefix, not moba)")
    parser.add_argument("--queries", type=int, help="how many to measure; by default all up to 4096 tokens, else 256")
    parser.add_argument("--seeds", type=int, default=3, help="routing seeds of patterns with chance")
    parser.add_argument("--output", type=Path, default=Path("results/reach"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Measure, then write record.json, table.md, plot.png and position.png, and print the table."""
    require("numpy", "matplotlib", "tqdm")
    from tqdm import tqdm

    from ..analysis.reach_report import Settings, measure, panels, position_panels, render, work
    from ..benchmark.memory import peak_memory
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    settings = Settings(
        n=args.n,
        window=args.window,
        layers=args.layers,
        patterns=split_list(args.patterns),
        causal=not args.bidirectional,
        queries=args.queries,
        seeds=args.seeds,
    ).checked()
    make_folder(args.output)
    with tqdm(total=work(settings), unit="field", unit_scale=True, dynamic_ncols=True) as bar:
        results = []
        for name in settings.patterns:
            bar.set_description(name)
            results.append(measure(settings, name, bar.update))
    table = render(results, settings)
    Record(
        args.command_line,
        asdict(settings),
        Environment.current(),
        {"patterns": [asdict(result) for result in results], "peak_memory_bytes": peak_memory()},
    ).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(results), "layers", args.output / "plot.png")
    depths = range(1, min(3, settings.layers) + 1)
    plot_panels(position_panels(results, depths), "position", args.output / "position.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png, position.png")
    return 0
