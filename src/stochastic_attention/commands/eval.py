"""Evaluate a model on tasks of lm-evaluation-harness: as it is, or under methods at budgets.

Finished cells (task, method, budget, seed) are kept in OUTPUT: the same command resumes, and one with further tasks,
methods, budgets or seeds runs those alone. Started by torchrun or `accelerate launch`, processes share the rows. Remote
code is never run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import interrupted, make_folder, require
from .options import count_or_auto, split_limits, split_list, split_numbers

if TYPE_CHECKING:
    from ..evaluation.harness.evaluate import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", help="hub name, folder (a trained model too), .gguf file, or smollm2-135m-instruct")
    parser.add_argument(
        "--tasks", default="hellaswag,piqa,winogrande", help="of the harness, comma-separated; mmlu: its 57 subjects"
    )
    parser.add_argument("--shots", type=int, help="examples before each question; by default the task's own number")
    parser.add_argument("--chat-template", action="store_true", help="put questions by the model's chat template")
    parser.add_argument("--log-samples", action="store_true", help="keep what is found in each row, in OUTPUT/samples")
    parser.add_argument(
        "--methods", default="", help="as in compare, comma-separated; by default the model runs its own attention"
    )
    parser.add_argument("--budgets", default="", help="mean keys a query, comma-separated")
    parser.add_argument("--match", default="w_scored", help="measured mean that meets the budget: w_scored or w_eff")
    parser.add_argument(
        "--seeds", type=int, default=1, help="draws of random orders: of the methods, or of the model's own layers"
    )
    parser.add_argument(
        "--limit", default="", help="rows of a task, from the first: N for each, TASK=N for one; by default all"
    )
    parser.add_argument("--length", type=int, help="most tokens of a window; by default the model's own")
    parser.add_argument("--data", type=Path, help="folder with the rows of tasks, in files")
    parser.add_argument("--allow-code", action="store_true", help="run programs that the model writes, for humaneval")
    parser.add_argument("--offline", action="store_true", help="touch no network: rows and model are on this machine")
    parser.add_argument(
        "--batch-size", type=count_or_auto, default=8, help="rows of a batch, or auto; no score depends on it"
    )
    parser.add_argument("--output", type=Path, default=Path("results/eval"), help="folder for all that is written")
    parser.add_argument("--device", help="where to run, as torch names it; by default the CPU")
    parser.add_argument("--device-map", help="auto: spread a large model over devices, in place of --device")
    parser.add_argument("--dtype", default="float32", help="of the model: float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op under methods; by default the fastest that can")


def run(args: argparse.Namespace) -> int:
    """Evaluate, then write record.json, table.md and, of a sweep, plot.png, and print the table."""
    if args.offline:  # read where these libraries are imported
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if args.allow_code:  # read by metrics of the harness's own
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    require("lm_eval", "transformers", "datasets", "matplotlib", "tqdm")
    from ..evaluation.curves import SWEEP_X_LABEL, sweep_panels
    from ..evaluation.harness import sharing
    from ..evaluation.harness.evaluate import Settings, evaluate
    from ..evaluation.harness.table import accuracies, render
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    if args.device is not None and args.device_map is not None:
        raise ValueError(f"device must not be given with a device_map, got {args.device} with {args.device_map}")
    tasks = split_list(args.tasks)
    settings = Settings(
        model=args.model,
        tasks=tasks,
        methods=split_list(args.methods),
        budgets=split_numbers("budgets", args.budgets),
        match=args.match,
        seeds=args.seeds,
        limits=split_limits(args.limit, tasks),
        length=args.length,
        data=args.data,
        offline=args.offline,
        device=args.device or "cpu",
        device_map=args.device_map,
        dtype=args.dtype,
        backend=args.backend,
        shots=args.shots,
        chat_template=args.chat_template,
        log_samples=args.log_samples,
        allow_code=args.allow_code,
    )
    make_folder(args.output)
    try:
        with sharing.group():
            outcome = evaluate(
                settings,
                args.output,
                batch_size=args.batch_size,
                on_cell=_tell if sharing.is_first() else None,
            )
            if not sharing.is_first():
                return 0
    except KeyboardInterrupt:
        return interrupted(args)
    table = render(outcome.results, outcome.differences, match=settings.match)
    Record(
        command=args.command_line,
        config=outcome.config,
        environment=Environment.current(),
        results=outcome.plain_results(),
    ).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    written = ["record.json", "table.md"]
    cells = accuracies(outcome.results) if settings.budgets else []
    if cells:
        plot_panels(sweep_panels(cells, "mean accuracy"), SWEEP_X_LABEL, args.output / "plot.png")
        written.append("plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/{', '.join(written)}")
    return 0


def _tell(found: list[Result], left: int) -> None:
    """Say what a finished cell gave; a sweep may take days."""
    from ..evaluation.harness.evaluate import headline

    first = found[0]
    metric = headline(first)
    cell = [first.task]
    if first.method is not None:
        cell.append(first.method)
    if first.budget is not None:
        cell.append(f"{first.budget} keys")
    if first.seed is not None and len(found) == 1:
        cell.append(f"draw {first.seed}")
    values = ", ".join(f"{result.metrics[metric].value:.3f}" for result in found)
    seconds = sum(result.seconds for result in found)
    print(f"{', '.join(cell)}: {metric} {values} ({seconds:.0f} s); cells left: {left}", file=sys.stderr)
