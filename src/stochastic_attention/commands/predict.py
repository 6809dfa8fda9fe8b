"""Predict the op's times on a GPU from counted work and assumed rates, beside the targets. Measures nothing."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from . import make_way
from .options import split_list, split_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, which are those of `sattn bench`."""
    parser.add_argument(
        "--patterns", default="swa,sliding,block,prefix-sliding,prefix-block,union,gated", help="comma-separated"
    )
    parser.add_argument("--lengths", default="2048,8192,32768,131072", help="tokens, comma-separated")
    parser.add_argument("--decode-lengths", default="8192,32768,131072,524288", help="cached tokens, comma-separated")
    parser.add_argument("--heads", type=int, default=16, help="query and key/value heads")
    parser.add_argument("--head-dim", default="64,128", help="of q, k and v, comma-separated: 64 and 128 are known")
    parser.add_argument("--tokens", type=int, default=131072, help="in a batch, but for decoding, where it is one row")
    parser.add_argument("--window", type=int, default=256, help="of every pattern")
    parser.add_argument("--output", type=Path, default=Path("results/gpu/predictions.json"), help="JSON file to write")


def run(args: argparse.Namespace) -> int:
    """Count, predict, print a table, and save the record and the table."""
    from ..benchmark.prediction import PREDICTED, Assumptions, predict, table
    from ..benchmark.sweep import cases
    from ..ops.validation import check_choice, check_count, check_distinct
    from ..records import Environment, Record, write_text

    names = split_list(args.patterns)
    check_distinct("patterns", names)
    for name in names:
        check_choice("patterns", name, PREDICTED)
    lengths, steps = split_numbers("lengths", args.lengths), split_numbers("decode_lengths", args.decode_lengths)
    head_dims = split_numbers("head_dim", args.head_dim)
    for option, values in (("lengths", lengths), ("decode_lengths", steps), ("head_dim", head_dims)):
        check_distinct(option, values)
        for value in values:
            check_count(option, value, minimum=1)
    for name in ("heads", "window"):
        check_count(name, getattr(args, name), minimum=1)
    check_count("tokens", args.tokens, minimum=0)

    if args.output.suffix == ".md":
        raise ValueError(f"output must be another file than the table beside it, which ends in .md, got {args.output}")
    make_way("output", args.output)
    assumed = Assumptions()
    todo = cases(("forward", "backward"), lengths, head_dims, tokens=args.tokens)
    todo += cases(("decode",), steps, head_dims, tokens=0)
    predictions = predict(todo, names, heads=args.heads, window=args.window, assumed=assumed)
    text = table(predictions, assumed)
    print(text)
    config = {key: value for key, value in vars(args).items() if key not in ("command", "command_line", "output")}
    results = {"assumptions": asdict(assumed), "predictions": [asdict(x) for x in predictions]}
    Record(args.command_line, config, Environment.current(), results).save(args.output)
    write_text(args.output.with_suffix(".md"), text)
    print(f"Written: {args.output} and {args.output.with_suffix('.md')}")
    return 0
