"""Compare attention patterns on a pretrained model, at equal measured budget.

Full attention always runs, as the reference. Finished cells are kept in OUTPUT; the same command resumes.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from . import interrupted, make_folder, require
from .options import split_limits, split_list, split_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="hub name, folder, .gguf file, or the embedded model"
    )
    parser.add_argument("--methods", default="full,swa,swa+sinks,sa,sa-prefix,union,moba", help="comma-separated")
    parser.add_argument("--budgets", default="64,128", help="mean keys a query, comma-separated")
    parser.add_argument("--tasks", default="recall,perplexity,hellaswag", help="comma-separated")
    parser.add_argument(
        "--limit", default="20", help="items a task: N for all, TASK=N for one; 8,hellaswag=40 has both"
    )
    parser.add_argument("--seeds", type=int, default=3, help="routing seeds of methods with chance")
    parser.add_argument("--match", default="w_scored", help="measured mean that meets the budget: w_scored or w_eff")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text window and of the timed prompt")
    parser.add_argument("--text", type=Path, help="text file for perplexity and recall; a line U+001E ends a document")
    parser.add_argument("--data", type=Path, help="folder with files of tasks that no wheel carries")
    parser.add_argument("--output", type=Path, default=Path("results/compare"), help="folder for all that is written")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="of the model: float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of a padded batch")
    parser.add_argument("--repeats", type=int, default=3, help="timed prefill passes")


def run(args: argparse.Namespace) -> int:
    """Compare, then write record.json, table.md and plot.png, and print the table."""
    require("transformers", "datasets", "matplotlib", "tqdm")
    from tqdm import tqdm

    from ..evaluation.compare import Settings, compare
    from ..evaluation.curves import X_LABEL, panels
    from ..evaluation.table import render
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    tasks = split_list(args.tasks)
    limits = split_limits(args.limit, tasks)
    without = [task for task, limit in zip(tasks, limits, strict=True) if limit is None]
    if without:
        raise ValueError(f"limit must give a number for {', '.join(without)}, got {args.limit!r}")
    settings = Settings(
        model=args.model,
        methods=split_list(args.methods),
        budgets=split_numbers("budgets", args.budgets),
        tasks=tasks,
        limits=tuple(limit for limit in limits if limit is not None),
        seeds=args.seeds,
        match=args.match,
        length=args.length,
        repeats=args.repeats,
        text=args.text,
        data=args.data,
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
    )
    make_folder(args.output)
    try:
        with ExitStack() as stack:
            outcome = compare(
                settings,
                args.output,
                batch_tokens=args.batch_tokens,
                progress=lambda: stack.enter_context(tqdm(unit="tok", unit_scale=True, dynamic_ncols=True)),
            )
    except KeyboardInterrupt:
        return interrupted(args)
    table = render(outcome.cells, outcome.prefill, match=settings.match, length=settings.length)
    record = Record(
        command=args.command_line,
        config=outcome.config,
        environment=Environment.current(),
        results=outcome.plain_results(),
    )
    record.save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(outcome.cells), X_LABEL, args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
