"""Evaluation by lm-evaluation-harness, task by task and resumable: a model as it is, or under methods at budgets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from ... import __version__
from ...hf import set_step
from ...hf.plan import check_swappable
from ...lm.text import digest
from ...models import LanguageModel, check_model, load_model, weights_digest
from ...ops.backends import backend_names
from ...ops.pattern import Pattern
from ...ops.validation import check_choice, check_count, check_device
from ...records import Estimate, write_text
from ..budget import Match, Queries
from ..compare import DTYPES
from ..draws import has_chance
from ..methods import METHODS, REFERENCE
from ..paired import Difference, ScoredRows, paired_differences
from ..prefill import attended
from ..requests import Profile
from .groups import expand, pool_results, share_limit
from .lm import CountingLM, MethodLM, SwappedLM
from .rows import Source, check_names, find_sources, load_task, task_manager
from .run import build_requests, quiet, run_task, seeded
from .sharing import is_first, on_first, open_journal, own_device

if TYPE_CHECKING:
    from lm_eval.api.task import Task

Model = TypeVar("Model", bound=SwappedLM)
Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What to evaluate. Two runs with equal settings give equal figures, times aside.

    Attributes:
        model: see `load_model`.
        tasks: single tasks of the harness, or groups of `groups`.
        methods, budgets: methods of `METHODS`, each set for each task to each budget; full attention always runs, as
            the reference. No methods: the model as it is.
        match: which measured mean meets the budget.
        seeds: draws of what is random: routing seeds of the methods, or routing steps, 0 and up, of a model that has
            stochastic layers itself.
        limits: rows of each task, from the first, None for all; of a group, shared evenly by its members.
        length: most tokens of a window; longer texts are cut, at the left or into rolling windows. None: the model's
            own.
        data: a folder with the rows of tasks.
        offline: whether rows may only come from this machine.
        shots: examples before each question. None: as many as the harness has for the task, of most none.
        device_map: how transformers spreads a large model over devices, in place of `device`.
        chat_template: whether questions are put by the model's chat template, examples as earlier turns.
        allow_code: whether programs that the model writes may be run (see `programs`).
        log_samples: whether what is found in each row is kept, in a file a cell.
    """

    model: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()
    match: Match = "w_scored"
    seeds: int = 1
    limits: tuple[int | None, ...] | None = None
    length: int | None = None
    data: Path | None = None
    offline: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None
    device_map: str | None = None
    shots: int | None = None
    chat_template: bool = False
    allow_code: bool = False
    log_samples: bool = False

    def __post_init__(self) -> None:
        """Check every setting before any work starts."""
        distinct = {"tasks": list(expand(self.tasks)), "methods": self.methods, "budgets": self.budgets}
        for name, values in distinct.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must be distinct, got {', '.join(map(str, values))}")
        if not self.tasks:
            raise ValueError("tasks must be at least one, got none")
        for method in self.methods:
            check_choice("methods", method, METHODS)
        if bool(set(self.methods) - {REFERENCE}) != bool(self.budgets):
            raise ValueError(
                f"budgets must be given with methods other than {REFERENCE}, got {list(self.budgets)} "
                f"with {', '.join(self.methods) or 'no method'}"
            )
        if self.backend is not None:
            check_choice("backend", self.backend, backend_names())
            if not self.methods:
                raise ValueError("backend must be given with methods, which it runs, got none")
        if self.limits is not None and len(self.limits) != len(self.tasks):
            raise ValueError(f"limits must be one a task, {len(self.tasks)}, got {len(self.limits)}")
        for name, value in [("length", self.length), *(("limit", limit) for limit in self.limits or ())]:
            if value is not None:
                check_count(name, value, minimum=1)
        for budget in self.budgets:
            check_count("budgets", budget, minimum=1)
        check_count("seeds", self.seeds, minimum=1)
        if self.shots is not None:
            check_count("shots", self.shots, minimum=0)
        check_choice("match", self.match, get_args(Match))
        check_choice("dtype", self.dtype, DTYPES)
        check_device(self.device)
        if self.device_map is not None:
            check_choice("device_map", self.device_map, ("auto", "balanced", "sequential"))
            if self.device != "cpu":
                raise ValueError(
                    f"device must not be given with a device_map, got {self.device} with {self.device_map}"
                )
        check_model(self.model)
        find_sources(distinct["tasks"], self.data, self.offline)


@dataclass(frozen=True)
class Result:
    """One task under one method at one budget and draw.

    Attributes:
        method, budget: None for the model as it is; no budget for full attention.
        seed: the draw, None where nothing is random.
        pattern: what every layer ran in place of its own attention, in words; None: the model as it is.
        w_eff, w_scored: measured mean keys over all queries, and over the scored ones; None for the model as it is.
        metrics: the harness's, by its names.
        seconds: spent scoring.
        rows: of each metric that is a mean over the rows, its value in every row, in their order.
    """

    task: str
    method: str | None
    budget: int | None
    seed: int | None
    pattern: str | None
    w_eff: float | None
    w_scored: float | None
    metrics: dict[str, Estimate]
    seconds: float
    rows: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Result:
        """Read what `dataclasses.asdict` made."""
        metrics = {name: Estimate(**estimate) for name, estimate in facts["metrics"].items()}
        return cls(**{**facts, "metrics": metrics})


# The first of them that a task has stands for it; length-normalised accuracy is the usual one for HellaSwag and ARC.
ACCURACIES = ("acc_norm", "acc", "exact_match", "pass@1")


def headline(result: Result) -> str:
    """The metric that stands for the task; of several filters of answers, under the first."""
    names = {label.partition(",")[0]: label for label in reversed(result.metrics)}
    found = (names[name] for name in (*ACCURACIES, "word_perplexity") if name in names)
    return next(found, next(iter(result.metrics)))


def is_accuracy(metric: str) -> bool:
    """Whether it is one that may be averaged over tasks, under whatever filter of answers."""
    return metric.partition(",")[0] in ACCURACIES


def _scored_rows(result: Result) -> ScoredRows:
    rows = result.rows.get(headline(result), [])
    return ScoredRows(result.task, str(result.method), result.budget, rows)


@dataclass(frozen=True)
class Outcome:
    """The finished evaluation.

    Attributes:
        results: a group of tasks as one.
        members: of groups, each by itself.
    """

    config: dict[str, Any]
    results: list[Result]
    members: list[Result] = field(default_factory=list)

    def plain_results(self) -> dict[str, Any]:
        """As plain data, for a record: what is told of rows is their differences."""
        cells, members = ([asdict(replace(one, rows={})) for one in found] for found in (self.results, self.members))
        for cell in cells + members:
            del cell["rows"]
        differences = [asdict(difference) for difference in self.differences]
        return {"cells": cells, "differences": differences} | ({"members": members} if members else {})

    @property
    def differences(self) -> list[Difference]:
        """Between methods, on the same rows."""
        return paired_differences([_scored_rows(result) for result in self.results if result.method is not None])


@dataclass(frozen=True)
class _Cell:
    """A piece of work: a task, whole or its first `limit` rows, under a method; the model as it is under all draws."""

    task: str
    limit: int | None
    method: str | None = None
    budget: int | None = None
    seed: int | None = None

    @property
    def key(self) -> str:
        """Its name in the journal."""
        rows = "" if self.limit is None else f":{self.limit}"
        return f"{self.task}{rows} {self.method} {self.budget} {self.seed}"

    def log(self, output: Path) -> Path:
        """The file of what is found in each row."""
        name = re.sub(r"[^\w.-]+", "-", self.key)
        return output / "samples" / f"{name}.jsonl"


def plan(settings: Settings, size: Callable[[str], int]) -> Iterator[_Cell]:
    """The cells, task by task and full attention first. `size`: the rows a task has."""
    limits = zip(settings.tasks, settings.limits or [None] * len(settings.tasks), strict=True)
    shares = [share_limit(name, rows, size) for name, rows in limits]
    for task, limit in chain.from_iterable(share.items() for share in shares):
        if not settings.methods:
            yield _Cell(task, limit)
            continue
        yield _Cell(task, limit, REFERENCE)
        for budget in settings.budgets:
            for method in settings.methods:
                if method != REFERENCE:
                    for seed in range(settings.seeds) if METHODS[method].is_random else (None,):
                        yield _Cell(task, limit, method, budget, seed)


def evaluate(
    settings: Settings,
    output: Path,
    *,
    batch_size: int | None = 8,
    on_cell: Callable[[list[Result], int], object] | None = None,
) -> Outcome:
    """Run what `output` does not hold yet, and return all of it.

    Args:
        settings: what to evaluate. A folder may be given further tasks, methods, budgets and seeds; what else the
            figures depend on must be as it was.
        output: folder of the journal, cells.jsonl, and of samples/.
        batch_size: rows of a batch, None for as many as memory holds. No score depends on it, so a resumed run may
            change it.
        on_cell: called after each finished cell with what was found, of every draw, and the number of cells left.
    """
    if batch_size is not None:
        check_count("batch_size", batch_size, minimum=1)
    names = list(expand(settings.tasks))
    sources = find_sources(names, settings.data, settings.offline)
    manager = task_manager(names)
    check_names(names, manager, allow_code=settings.allow_code)
    origins = {name: _origin(source) for name, source in sources.items()}
    facts = {f"rows of {name}": origin for name, origin in origins.items()}
    journal = open_journal(output / "cells.jsonl", _lasting(settings), facts)

    @cache
    def load(name: str) -> Task:
        with quiet(), seeded():
            return load_task(name, sources[name], manager, shots=settings.shots)

    cells = list(plan(settings, lambda name: len(load(name).eval_docs)))
    waiting = on_first(
        lambda: [
            cell
            for cell in cells
            if cell.key not in journal.done or (settings.log_samples and not cell.log(output).exists())
        ]
    )
    # Every task is loaded, and its rows are there, before the first one runs.
    tasks = {name: load(name) for name in dict.fromkeys(cell.task for cell in waiting)}
    left = len(waiting)
    if waiting:
        language = load_model(
            settings.model,
            device=own_device(settings.device) if settings.device_map is None else None,
            dtype=DTYPES[settings.dtype],
            device_map=settings.device_map,
        )
        if settings.chat_template and language.tokenizer.chat_template is None:
            raise ValueError(f"chat_template must be False for {settings.model}, whose tokenizer has none, got True")
        for name, task in tasks.items():
            mine = [cell for cell in waiting if cell.task == name]
            for cell, found in _run(task, mine, settings, language, batch_size):
                if settings.log_samples and is_first():
                    _log(cell.log(output), found)
                journal.add(cell.key, [asdict(result) for result, _ in found])
                left -= 1
                if on_cell is not None:
                    on_cell([result for result, _ in found], left)
    results = [Result.from_json(facts) for cell in cells for facts in journal.done[cell.key]]
    members = [result for result in results if result.task not in settings.tasks]
    config = {**_plain(settings), **_lasting(settings), "sources": origins}
    return Outcome(config, pool_results(results, settings.tasks), members)


def _run(
    task: Task, cells: Sequence[_Cell], settings: Settings, language: LanguageModel, batch_size: int | None
) -> Iterator[tuple[_Cell, list[tuple[Result, Samples]]]]:
    """The cells of one task."""
    if settings.length is not None and language.longest is not None and settings.length > language.longest:
        raise ValueError(f"length must fit the model's {language.longest} positions, got {settings.length}")
    if not settings.methods:
        lm = _silently(SwappedLM, language, settings, batch_size)
        for cell in cells:
            yield cell, list(_as_it_is(task, cell, lm, language, settings))
        return
    check_swappable(language.model.config)
    lm = _silently(MethodLM, language, settings, batch_size, attention_backend=settings.backend)
    queries = Queries(_profile(task, cells[0].limit, settings, language))
    for cell in cells:
        method = METHODS[str(cell.method)]
        fitted = Pattern.full() if cell.budget is None else method.fit(queries, cell.budget, settings.match)
        lm.pattern = fitted if cell.seed is None else fitted.seeded(cell.seed)
        result, samples = _timed(task, cell, lm, settings)
        budget = queries.measured(attended(language.model, lm.pattern))
        result = replace(result, pattern=str(lm.pattern), w_eff=budget.w_eff, w_scored=budget.w_scored)
        yield cell, [(result, samples)]


def _as_it_is(
    task: Task, cell: _Cell, lm: SwappedLM, language: LanguageModel, settings: Settings
) -> Iterator[tuple[Result, Samples]]:
    """Under every draw of the model's own."""
    for step in range(settings.seeds) if has_chance(language) else (None,):
        if step is not None:
            set_step(language.model, step)
        yield _timed(task, replace(cell, seed=step), lm, settings)


def _timed(task: Task, cell: _Cell, lm: SwappedLM, settings: Settings) -> tuple[Result, Samples]:
    start = time.perf_counter()
    found = run_task(task, lm, cell.limit, chat_template=settings.chat_template)
    result = Result(
        task=cell.task,
        method=cell.method,
        budget=cell.budget,
        seed=cell.seed,
        pattern=None,
        w_eff=None,
        w_scored=None,
        metrics=found.metrics,
        seconds=time.perf_counter() - start,
        rows=found.rows,
    )
    return result, found.samples


def _log(path: Path, found: Sequence[tuple[Result, Samples]]) -> None:
    lines = [json.dumps({"seed": result.seed, **sample}, default=str) for result, rows in found for sample in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")


def _profile(task: Task, limit: int | None, settings: Settings, language: LanguageModel) -> Profile:
    lm = _silently(CountingLM, language, settings, 1)
    lm.lengths = Profile()
    build_requests(task, lm, limit, chat_template=settings.chat_template)
    for instance in task.instances:
        getattr(lm, instance.request_type)([instance], disable_tqdm=True)
    return lm.lengths


def _silently(
    kind: type[Model], language: LanguageModel, settings: Settings, batch_size: int | None, **options: str | None
) -> Model:
    with quiet():
        return kind(
            pretrained=language.model,  # type: ignore[call-arg]
            tokenizer=language.tokenizer,  # type: ignore[call-arg]
            batch_size=batch_size or "auto",  # type: ignore[call-arg]
            max_length=settings.length,  # type: ignore[call-arg]
            **options,
        )


def _plain(settings: Settings) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}


# Settings that say which cells there are, or no more than where rows are looked for.
_AXES = ("tasks", "methods", "budgets", "seeds", "limits", "data", "offline", "allow_code", "log_samples")


def _lasting(settings: Settings) -> dict[str, Any]:
    """What every cell's figures depend on."""
    return {
        **{name: value for name, value in _plain(settings).items() if name not in _AXES},
        "weights": weights_digest(settings.model),
        "version": __version__,
        "lm_eval": version("lm_eval"),
    }


def _origin(source: Source) -> dict[str, str | None]:
    """Where a task's rows come from, and a digest of the file, if it is one."""
    is_file = source.path is not None and source.path.is_file()
    return {"words": source.words, "digest": digest([source.path])[:16] if is_file and source.path else None}
