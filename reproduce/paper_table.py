"""Put the runs of paper_tables.sh on one model side by side, a line a method and budget, into FOLDER/table.md.

    python3 reproduce/paper_table.py FOLDER

MMLU is the mean over all its questions. Which accuracy the paper gives, its public summaries do not say: here it is the
length-normalised one where the harness has it, for HellaSwag and ARC.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from stochastic_attention.records import Record, write_text
from stochastic_attention.tables import markdown

TASKS = {
    "MMLU": "mmlu_",
    "BoolQ": "boolq",
    "HellaSwag": "hellaswag",
    "LAMBADA": "lambada_openai",
    "ARC-Easy": "arc_easy",
    "ARC-Challenge": "arc_challenge",
}

Result = Mapping[str, Any]


def table(records: Sequence[Record]) -> str:
    """Accuracies in per cent, mean and standard deviation over seeds; a task that has not run is empty.

    w_eff and w_scored are means over all tasks, each counted once, MMLU by its questions.
    """
    header = ["method", "budget", *TASKS, "average", "w_eff", "w_scored"]
    rows = [_row(record) for record in sorted(records, key=_place)]
    matched = {record.config["match"] for record in records if record.config["budget"]}
    notes = [
        "Zero-shot accuracy in per cent, average over the tasks of the line; ±: standard deviation over routing seeds.",
        f"Budgets are means of {', '.join(sorted(matched)) or 'nothing'}; both means are measured.",
        "Means below the budget: some texts are shorter than it, and there a method is full attention.",
    ]
    return markdown([header, *rows]) + "\n" + "".join(f"- {note}\n" for note in notes)


def _place(record: Record) -> tuple[int, str]:
    return record.config["budget"] or 0, str(record.config["method"])


def _row(record: Record) -> list[str]:
    results: Sequence[Result] = record.results["tasks"]
    # A method without chance ran once: its seed is None.
    draws = [
        {name: mine for name, start in TASKS.items() if (mine := _of(results, start, seed))}
        for seed in dict.fromkeys(result["seed"] for result in results)
    ]
    cells = [_cell([_mean(draw[name], _accuracy) for draw in draws if name in draw]) for name in TASKS]
    cells.append(_cell([_over_tasks(draw, _accuracy) for draw in draws]))
    keys = [statistics.fmean(_over_tasks(draw, itemgetter(name)) for draw in draws) for name in ("w_eff", "w_scored")]
    return [record.config["method"], str(record.config["budget"] or "-"), *cells, *(f"{mean:.1f}" for mean in keys)]


def _of(results: Sequence[Result], start: str, seed: int | None) -> list[Result]:
    return [result for result in results if result["task"].startswith(start) and result["seed"] == seed]


def _accuracy(result: Result) -> float:
    metrics = result["metrics"]
    return 100 * metrics.get("acc_norm", metrics["acc"])["value"]


def _over_tasks(draw: Mapping[str, Sequence[Result]], read: Callable[[Result], float]) -> float:
    return statistics.fmean(_mean(mine, read) for mine in draw.values())


def _mean(results: Sequence[Result], read: Callable[[Result], float]) -> float:
    """Over questions: subjects of MMLU count by their size."""
    rows = [result["metrics"]["acc"]["n"] for result in results]
    return sum(read(result) * n for result, n in zip(results, rows, strict=True)) / sum(rows)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def main(folder: Path) -> int:
    """Write the table of the records in the subfolders of `folder`, and print it. 2 where there is none."""
    records = [Record.load(path) for path in sorted(folder.glob("*/record.json"))]
    if not records:
        print(f"{folder} must hold folders with a record.json each, got none", file=sys.stderr)
        return 2
    text = table(records)
    write_text(folder / "table.md", text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    sys.exit(main(Path(sys.argv[1])))
