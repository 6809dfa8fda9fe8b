"""Train small models on synthetic tasks, and measure what each kind of attention recalls, by distance.

Finished models are kept in OUTPUT: the same command resumes, one with more kinds, windows, depths or seeds adds to it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from . import interrupted, make_folder, require
from .options import split_list, split_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", default="mqar", help="mqar (associative recall) or copy")
    parser.add_argument(
        "--attention",
        default="full,swa,sa,gated,gated-half",
        help="comma-separated; gated: SA and SWA at the full window each, gated-half: at half of it each",
    )
    parser.add_argument("--scope", default="sequence", help="of SA: sequence, prefix or both, comma-separated")
    parser.add_argument("--shape", default="sliding", help="of SA: sliding, block or both, comma-separated")
    parser.add_argument("--window", default="8", help="comma-separated")
    parser.add_argument("--layers", default="2", help="comma-separated")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--pairs", type=int, help="key-value pairs of a row of mqar, by default 8")
    parser.add_argument(
        "--symbols", type=int, help="keys, and values, of mqar, by default twice the pairs; letters of copy"
    )
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind")
    parser.add_argument("--steps", type=int, default=1500, help="most optimizer steps of a model")
    parser.add_argument("--batch", type=int, default=32, help="rows of an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest, after a warmup, before a cosine")
    parser.add_argument("--hidden", type=int, default=64, help="width of the models")
    parser.add_argument("--heads", type=int, default=2, help="of the models")
    parser.add_argument("--rows", type=int, default=256, help="test rows")
    parser.add_argument("--routing-steps", type=int, default=16, help="permutations that evaluation averages over")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--output", type=Path, default=Path("results/probe"), help="folder for all that is written")


def run(args: argparse.Namespace) -> int:
    """Train what OUTPUT does not hold, then write record.json, table.md and plot.png, and print the table."""
    require("transformers", "numpy", "matplotlib", "tqdm")
    from tqdm import tqdm

    from .. import __version__
    from ..evaluation.journal import Journal
    from ..lm.probes.cells import Settings, Training, plan
    from ..lm.probes.report import panels, render
    from ..lm.probes.tasks import TaskSize
    from ..lm.probes.training import ProbeResult, train
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    pairs, symbols = args.pairs, args.symbols
    if pairs is None:
        pairs = 8 if args.task == "mqar" else 0
    if symbols is None:
        symbols = 2 * pairs if args.task == "mqar" else max(1, (args.length - 2) // 2)
    settings = Settings(
        task=args.task,
        attention=split_list(args.attention),
        scopes=split_list(args.scope),
        shapes=split_list(args.shape),
        windows=split_numbers("window", args.window),
        layers=split_numbers("layers", args.layers),
        size=TaskSize(length=args.length, symbols=symbols, pairs=pairs),
        training=Training(
            steps=args.steps,
            batch=args.batch,
            learning_rate=args.learning_rate,
            hidden=args.hidden,
            heads=args.heads,
        ),
        seeds=args.seeds,
        rows=args.rows,
        routing_steps=args.routing_steps,
        device=args.device,
    )
    cells = plan(settings)
    make_folder(args.output)
    journal = Journal(args.output / "cells.jsonl", {**settings.of_a_cell, "version": __version__})
    waiting = [cell for cell in cells if cell.key not in journal.done]
    try:
        with tqdm(total=len(waiting) * args.steps, unit="step", dynamic_ncols=True) as bar:
            for at, cell in enumerate(waiting, start=1):
                bar.set_description(cell.key)
                journal.add(cell.key, asdict(train(settings, cell, bar.update)))
                bar.update(at * args.steps - bar.n)  # what stopping early has saved
    except KeyboardInterrupt:
        return interrupted(args)
    results = [(cell, ProbeResult.from_json(journal.done[cell.key])) for cell in cells]
    table = render(results, settings)
    Record(
        args.command_line,
        asdict(settings),
        Environment.current(),
        {cell.key: asdict(result) for cell, result in results},
    ).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(results), "distance", args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
