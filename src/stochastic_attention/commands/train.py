"""Train a language model from a YAML configuration; the same command resumes.

Alone, or as each process of torchrun. What is written where, and what may change on resuming: docs/training.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import make_folder, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--config", type=Path, required=True, help="YAML file with model, tokenizer, data, training")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="over the file's; may come often"
    )
    parser.add_argument("--output", type=Path, help="folder for all that is written; by default results/NAME of CONFIG")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from OUTPUT's newest checkpoint"
    )
    parser.add_argument("--cache", type=Path, help="folder for tokens and a learned tokenizer; by default OUTPUT/data")


def run(args: argparse.Namespace) -> int:
    """Train, and say where the model is, or how to resume."""
    require("transformers", "accelerate", "yaml", "matplotlib", "tqdm")
    from transformers.utils import logging

    from ..lm.callbacks import NotFiniteError
    from ..lm.data import DataExhausted
    from ..lm.train import train
    from ..lm.train_config import read_config

    logging.disable_progress_bar()  # of every file that a checkpoint writes
    config = read_config(args.config, args.set)
    output = args.output or Path("results") / args.config.stem
    make_folder(output)
    try:
        outcome = train(config, output, command=args.command_line, resume=args.resume, cache=args.cache)
    except (DataExhausted, NotFiniteError) as error:
        print(f"sattn train: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") != "0":
        return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by
    if outcome.stopped_by is not None:
        print(
            f"Stopped by {outcome.stopped_by.name} after step {outcome.step}, which is saved in {output}/checkpoints. "
            f"To resume: {args.command_line}",
            file=sys.stderr,
        )
        return 128 + outcome.stopped_by
    print(f"Written: {output}/model, record.json, loss.jsonl, loss.png")
    return 0
