"""Measure how fast layers of attention patterns mix tokens, beside the closed form of a sliding window."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from . import make_folder, require
from .options import split_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--n", type=int, default=4096, help="tokens")
    parser.add_argument("--window", type=int, default=64, help="of every pattern")
    parser.add_argument("--patterns", default="swa,sa,sa-block,gated,gated-half", help="comma-separated")
    parser.add_argument("--seeds", type=int, default=5, help="routing seeds of patterns with chance")
    parser.add_argument("--starts", type=int, default=16, help="tokens that walks start from, both ends among them")
    parser.add_argument("--limit", type=int, default=10000, help="most layers of a walk")
    parser.add_argument("--output", type=Path, default=Path("results/mixing"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Measure, then write record.json, table.md and plot.png, and print the table."""
    require("numpy", "scipy", "matplotlib", "tqdm")
    from tqdm import tqdm

    from ..analysis.mixing_report import Settings, closed_forms, measure, panels, render, runs_of
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    settings = Settings(
        n=args.n,
        window=args.window,
        patterns=split_list(args.patterns),
        seeds=args.seeds,
        starts=args.starts,
        limit=args.limit,
    )
    settings.check()
    make_folder(args.output)
    with tqdm(total=sum(runs_of(settings, name) for name in settings.patterns), unit="run", dynamic_ncols=True) as bar:
        results = []
        for name in settings.patterns:
            bar.set_description(name)
            results.append(measure(settings, name, bar.update))
    table = render(results, settings)
    measured = {"patterns": [asdict(result) for result in results], "closed_forms": closed_forms(settings)}
    Record(args.command_line, asdict(settings), Environment.current(), measured).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(results), "layers", args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
