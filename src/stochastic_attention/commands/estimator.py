"""Measure the bias and variance of one stochastic layer as its window grows, with fitted slopes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from . import make_folder, require
from .options import split_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--n", type=int, default=8192, help="keys")
    parser.add_argument("--windows", default="8,16,32,64,128", help="comma-separated, at least three")
    parser.add_argument("--local", type=int, default=64, help="last keys that the unions hold")
    parser.add_argument("--queries", type=int, default=64, help="the last positions, to average over")
    parser.add_argument("--draws", type=int, default=512, help="random orders")
    parser.add_argument("--head-dim", type=int, default=16, help="of queries, keys and values")
    parser.add_argument("--score-std", type=float, default=1.0, help="standard deviation of scores; 0: equal weights")
    parser.add_argument("--bound", type=float, default=1.0, help="of the values")
    parser.add_argument("--memory", type=float, default=64.0, help="positions over which keys stay alike; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up problem")
    parser.add_argument("--output", type=Path, default=Path("results/estimator"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Measure, then write record.json, table.md and plot.png, and print the table."""
    require("numpy", "matplotlib", "tqdm")
    from tqdm import tqdm

    from ..analysis.estimator_report import Settings, measure, panels, render, work
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    settings = Settings(
        n=args.n,
        windows=split_numbers("windows", args.windows),
        local=args.local,
        queries=args.queries,
        draws=args.draws,
        head_dim=args.head_dim,
        score_std=args.score_std,
        bound=args.bound,
        memory=args.memory,
        seed=args.seed,
    )
    settings.check()
    make_folder(args.output)
    with tqdm(total=work(settings), dynamic_ncols=True) as bar:
        series = measure(settings, bar.update)
    table = render(series, settings)
    measured = {"series": [asdict(one) for one in series]}
    Record(args.command_line, asdict(settings), Environment.current(), measured).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(series), "window", args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
