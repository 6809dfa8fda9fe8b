"""Compare models on a text: perplexity by position, and by the distance of the context that a token needs.

Finished models are kept in OUTPUT; the same command resumes, and may name more of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import interrupted, make_folder, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="hub name, folder (a trained model too) or .gguf file; KIND=MODEL puts models of one kind together",
    )
    parser.add_argument("--text", default="embedded", help="UTF-8 file; a line U+001E ends a document")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="how many, evenly spaced over the text; by default all")
    parser.add_argument("--draws", type=int, default=1, help="draws of random orders that losses are averaged over")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of a batch")
    parser.add_argument(
        "--output", type=Path, default=Path("results/perplexity"), help="folder for all that is written"
    )
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="of the models: float32, bfloat16 or float16")


def run(args: argparse.Namespace) -> int:
    """Measure, then write record.json, table.md and plot.png, and print the table."""
    require("transformers", "datasets", "matplotlib", "tqdm")
    from tqdm import tqdm

    from ..evaluation.loss_comparison import X_LABEL, Named, Settings, measure, panels, render
    from ..plots import plot_panels
    from ..records import Environment, Record, write_text

    settings = Settings(
        text=args.text,
        length=args.length,
        windows=args.windows,
        draws=args.draws,
        device=args.device,
        dtype=args.dtype,
    )
    models = [Named.parse(text) for text in args.models]
    make_folder(args.output)
    try:
        with tqdm(unit="window", dynamic_ncols=True) as bar:

            def on_windows(done: int, total: int) -> None:
                bar.total = total
                bar.update(done)

            outcome = measure(settings, models, args.output, batch_tokens=args.batch_tokens, on_windows=on_windows)
    except KeyboardInterrupt:
        return interrupted(args)
    table = render(outcome)
    Record(
        command=args.command_line,
        config=outcome.config,
        environment=Environment.current(),
        results=outcome.plain_results(),
    ).save(args.output / "record.json")
    write_text(args.output / "table.md", table)
    plot_panels(panels(outcome), X_LABEL, args.output / "plot.png")
    print(table, end="")
    print(f"\nWritten: {args.output}/record.json, table.md, plot.png")
    return 0
