"""Find the best union of local, sink and stochastic keys for a model, a budget and a text, and keep it as a preset.

Many candidates run on few windows, the best third of them on more, and the last few over several seeds beside full
attention and a window with sinks at the same budget. What is finished is kept in OUTPUT; the same command resumes.
"""

from __future__ import annotations

import argparse
import shlex
from contextlib import ExitStack
from pathlib import Path

from . import interrupted, make_folder, require
from .options import split_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="hub name, folder, .gguf file, or the embedded model"
    )
    parser.add_argument("--budget", type=int, required=True, help="mean keys a query, in every layer")
    parser.add_argument("--text", type=Path, help="calibration text, UTF-8; a line U+001E ends a document")
    parser.add_argument(
        "--tasks", default="perplexity,recall", help="the first is searched by, all are reported; comma-separated"
    )
    parser.add_argument("--windows", type=int, default=9, help="items of each task")
    parser.add_argument("--candidates", type=int, default=54, help="how many of the grid take part")
    parser.add_argument("--finalists", type=int, default=3, help="how many are compared over all seeds")
    parser.add_argument("--seeds", type=int, default=3, help="routing seeds of the finalists")
    parser.add_argument("--match", default="w_scored", help="mean that meets the budget: w_scored or w_eff")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text window and of the timed prompt")
    parser.add_argument("--data", type=Path, help="folder with files of tasks that no wheel carries")
    parser.add_argument("--name", default="recommended", help="of the preset, and of its file in OUTPUT")
    parser.add_argument("--output", type=Path, default=Path("results/recommend"), help="folder for all that is written")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="of the model: float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of a padded batch")


BASELINE = "swa+sinks"


def run(args: argparse.Namespace) -> int:
    """Search and compare, write NAME.json and table.md, and print the table and what it says."""
    require("transformers", "tqdm")
    from tqdm import tqdm

    from ..evaluation.compare import Settings
    from ..evaluation.recommend import recommend, verdict
    from ..evaluation.table import render
    from ..hf import save_preset
    from ..records import Environment, Record, write_text

    tasks = split_list(args.tasks)
    if not args.name or Path(args.name).name != args.name or args.name.startswith("finalist-"):
        raise ValueError(f"name must be that of a file without a folder, and of no finalist, got {args.name!r}")
    settings = Settings(
        model=args.model,
        methods=(BASELINE,),
        budgets=(args.budget,),
        tasks=tasks,
        limits=(args.windows,) * len(tasks),
        seeds=args.seeds,
        match=args.match,
        length=args.length,
        repeats=1,
        text=args.text,
        data=args.data,
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
    )
    make_folder(args.output)
    try:
        with ExitStack() as stack:

            def bar() -> tqdm:
                stack.close()  # the search's own ends before that of the comparison begins
                return stack.enter_context(tqdm(unit="tok", unit_scale=True, dynamic_ncols=True))

            found = recommend(
                settings,
                args.output,
                candidates=args.candidates,
                finalists=args.finalists,
                batch_tokens=args.batch_tokens,
                progress=bar,
            )
    except KeyboardInterrupt:
        return interrupted(args)
    table = render(found.outcome.cells, found.outcome.prefill, match=settings.match, length=settings.length)
    said = verdict(found, BASELINE)
    told = f"{table}\n{said}\n"
    record = Record(
        command=args.command_line,
        config={**found.outcome.config, "candidates": args.candidates, "finalists": args.finalists},
        environment=Environment.current(),
        results={
            "finalists": {method: str(candidate) for method, candidate in found.finalists.items()},
            **found.outcome.plain_results(),
            "verdict": said,
        },
    )
    path = args.output / f"{args.name}.json"
    save_preset(path, args.name, found.preset, record)
    write_text(args.output / "table.md", told)
    print(told, end="")
    judge = shlex.join(["sattn", "compare", "--methods", f"preset:{path}", "--text", "OTHER"])
    print(f"\nWritten: {path}, {args.output}/table.md. To judge it: {judge}")
    return 0
