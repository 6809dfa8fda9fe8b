"""The comparison: every method at every budget on every task, at equal measured budget, resumable cell by cell."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch

from .. import __version__
from ..hf.presets import Preset
from ..models import EMBEDDED, LanguageModel, check_model, load_model
from ..ops.backends import backend_names
from ..ops.pattern import Pattern
from ..ops.validation import check_choice, check_count, check_device, check_distinct
from .budget import Budget, Match, Queries
from .journal import Journal
from .methods import METHODS, REFERENCE, check_methods, preset_of
from .prefill import attended, attending, prefill_times
from .requests import Item, Profile, profile
from .results import CellResult, PrefillResult
from .scoring import score_requests
from .tasks import TASKS, TaskOptions, check_tasks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What to compare. Two runs with equal settings give equal figures, times aside.

    Attributes:
        model: see `load_model`.
        methods, tasks: names from `METHODS` and `TASKS`; full attention always runs, as the reference. "preset:FILE" is
            what the file says, whatever the budgets.
        budgets: mean keys a query.
        limits: items of each task.
        seeds: how many routing seeds, 0 and up, for methods with chance.
        match: which measured mean meets the budget.
        length: tokens of a text window and of the timed prompt.
        repeats: timed passes of each method; their median is reported.
    """

    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    tasks: tuple[str, ...]
    limits: tuple[int, ...]
    model: str = EMBEDDED
    seeds: int = 3
    match: Match = "w_scored"
    length: int = 1024
    repeats: int = 3
    text: Path | None = None
    data: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check every setting before any work starts."""
        for name in ("methods", "budgets", "tasks"):
            check_distinct(name, getattr(self, name))
        check_methods(self.methods)
        for budget in self.budgets:
            check_count("budgets", budget, minimum=1)
        check_tasks(self.tasks, self.task_options)
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"data must be a folder, got {str(self.data)!r}")
        if len(self.limits) != len(self.tasks):
            raise ValueError(f"limits must be one a task, {len(self.tasks)}, got {len(self.limits)}")
        for limit in self.limits:
            check_count("limit", limit, minimum=1)
        check_count("seeds", self.seeds, minimum=1)
        check_count("length", self.length, minimum=8)
        check_count("repeats", self.repeats, minimum=1)
        check_choice("match", self.match, get_args(Match))
        check_choice("dtype", self.dtype, DTYPES)
        if self.backend is not None:
            check_choice("backend", self.backend, backend_names())
        check_device(self.device)
        check_model(self.model)

    @property
    def task_options(self) -> TaskOptions:
        """The settings that tasks read."""
        return TaskOptions(length=self.length, text=self.text, data=self.data)


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison, planned: which pattern is to be scored on which task."""

    task: str
    method: str
    budget: int | None
    seed: int | None
    pattern: Pattern | Preset
    saturated: bool

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.task} {self.method} {self.budget} {self.seed}"


class Progress(Protocol):
    """What the comparison tells of its work; a tqdm bar is one."""

    total: float | None

    def update(self, n: float = 1) -> object:
        """`n` more units are done."""

    def set_description(self, desc: str) -> object:
        """Work on `desc` begins."""


@dataclass(frozen=True)
class Outcome:
    """The finished comparison."""

    config: dict[str, Any]
    cells: list[CellResult]
    prefill: list[PrefillResult]

    def plain_results(self) -> dict[str, Any]:
        """Cells and times as plain data, for a record."""
        return {"cells": [asdict(cell) for cell in self.cells], "prefill": [asdict(time) for time in self.prefill]}


def compare(
    settings: Settings,
    output: Path,
    *,
    batch_tokens: int = 4096,
    progress: Callable[[], Progress] | None = None,
    load: Callable[..., LanguageModel] = load_model,
) -> Outcome:
    """Run what `output` does not hold yet, and return all of it.

    Args:
        settings: what to compare.
        output: folder of the journal, cells.jsonl.
        batch_tokens: most tokens of a padded batch. No score depends on it, so a resumed run may change it.
        progress: makes the progress bar once the work is known.
        load: reads the model; the seam for models that are already in memory.
    """
    check_count("batch_tokens", batch_tokens, minimum=1)
    language = load(settings.model, device=settings.device, dtype=DTYPES[settings.dtype])
    for preset in filter(None, map(preset_of, settings.methods)):
        preset.plans(language.model.config.get_text_config())  # raises where it is for other layers
    items = items_of(settings, language)
    profiles = {task: profile(request for item in items[task] for request in item.requests) for task in items}
    journal = Journal(output / "cells.jsonl", config_of(settings, items))
    full = is_full(language)
    cells = [cell for task in settings.tasks for cell in plan(settings, task, Queries(profiles[task]), full=full)]
    timed = _plan_prefill(settings, full)

    waiting = [cell for cell in cells if cell.key not in journal.done]
    bar = progress() if progress is not None else None
    if bar is not None:
        bar.total = sum(_tokens(profiles[cell.task]) for cell in waiting if not cell.saturated)
        if _PREFILL not in journal.done:
            bar.total += len(_to_time(timed)) * (settings.repeats + 1) * settings.length
    for cell in waiting:
        if bar is not None:
            bar.set_description(f"{cell.task} {cell.method} {cell.budget or ''}")
        result = _run(cell, items[cell.task], Queries(profiles[cell.task]), language, settings, batch_tokens, bar)
        journal.add(cell.key, asdict(result))
    if _PREFILL not in journal.done:
        if bar is not None:
            bar.set_description("prefill time")
        journal.add(_PREFILL, [asdict(result) for result in _time(timed, language, settings, bar)])
    return Outcome(
        config=config_of(settings, items),
        cells=[CellResult.from_json(journal.done[cell.key]) for cell in cells],
        prefill=[PrefillResult(**facts) for facts in journal.done[_PREFILL]],
    )


# All methods are timed in one go, so their times are one piece of the journal.
_PREFILL = "prefill"


# Method, budget, pattern, and whether it is saturated.
_Fit = tuple[str, int | None, Pattern | Preset, bool]


def is_full(language: LanguageModel) -> bool:
    """Whether every layer of the untouched model sees everything; else a method at a large budget sees more than it."""
    return all(pattern == Pattern.full() for pattern in attended(language.model, Pattern.full()))


def plan(settings: Settings, task: str, queries: Queries, *, full: bool = True) -> list[Cell]:
    """The cells of one task, the untouched model first, which is `full` or has windows of its own."""
    whole = Cell(task, REFERENCE, None, None, Pattern.full(), False)
    cells = [whole]
    for method, budget, pattern, saturated in _fits(settings, queries, full):
        for seed in range(settings.seeds) if pattern.is_random else (None,):
            seeded = pattern if seed is None else pattern.seeded(seed)
            cells.append(Cell(task, method, budget, seed, seeded, saturated))
    return cells


def _fits(settings: Settings, queries: Queries, full: bool) -> list[_Fit]:
    most = getattr(queries.expected(Pattern.full()), settings.match)
    fits: list[_Fit] = []
    for method in settings.methods:
        preset = preset_of(method)
        if preset is not None:
            fits.append((method, None, preset, False))
            continue
        for budget in settings.budgets if method != REFERENCE else ():
            saturated = full and most <= budget
            pattern = Pattern.full() if saturated else METHODS[method].fit(queries, budget, settings.match)
            fits.append((method, budget, pattern, saturated))
    return fits


def items_of(settings: Settings, language: LanguageModel) -> dict[str, list[Item]]:
    """The items of each task; ValueError for what does not fit the model's positions."""
    positions = language.longest
    if positions is not None and settings.length > positions:
        raise ValueError(f"length must fit the model's {positions} positions, got {settings.length}")
    items = {}
    for task, limit in zip(settings.tasks, settings.limits, strict=True):
        items[task] = TASKS[task].items(language.tokenizer, settings.task_options, limit)
        longest = max(request.queries for item in items[task] for request in item.requests)
        if positions is not None and longest > positions:
            raise ValueError(
                f"tasks must have items that fit the model's {positions} positions, "
                f"got {task} with an item of {longest} tokens"
            )
    return items


def config_of(settings: Settings, items: dict[str, list[Item]]) -> dict[str, Any]:
    """All that the figures depend on. Digests stand for the tokens: other data or another tokenizer shows in them."""
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    presets = {name: str(preset) for name in settings.methods if (preset := preset_of(name)) is not None}
    return {
        **facts,
        **({"presets": presets} if presets else {}),
        "sources": {task: TASKS[task].source(settings.task_options) for task in items},
        "digests": {task: hashlib.sha256(repr(rows).encode()).hexdigest()[:16] for task, rows in items.items()},
        "version": __version__,
    }


def _run(
    cell: Cell,
    items: Sequence[Item],
    queries: Queries,
    language: LanguageModel,
    settings: Settings,
    batch_tokens: int,
    bar: Progress | None,
) -> CellResult:
    budget = _measured(queries, cell.pattern, language)
    if cell.saturated:
        return _result(cell, budget, {}, 0.0)
    requests = [request for item in items for request in item.requests]
    start = time.perf_counter()
    with attending(language.model, cell.pattern, settings.backend):
        scores = iter(
            score_requests(
                language.model, requests, batch_tokens=batch_tokens, on_batch=None if bar is None else bar.update
            )
        )
    grouped = [[next(scores) for _ in item.requests] for item in items]
    return _result(cell, budget, TASKS[cell.task].metrics(items, grouped), time.perf_counter() - start)


def _measured(queries: Queries, pattern: Pattern | Preset, language: LanguageModel) -> Budget:
    return queries.measured(attended(language.model, pattern))


def _result(cell: Cell, budget: Budget, metrics: dict[str, Any], seconds: float) -> CellResult:
    return CellResult(
        task=cell.task,
        method=cell.method,
        budget=cell.budget,
        seed=cell.seed,
        pattern=str(cell.pattern),
        saturated=cell.saturated,
        w_eff=budget.w_eff,
        w_scored=budget.w_scored,
        metrics=metrics,
        seconds=seconds,
    )


def _plan_prefill(settings: Settings, full: bool) -> list[_Fit]:
    """The untouched model first."""
    return [(REFERENCE, None, Pattern.full(), False), *_fits(settings, _prompt(settings), full)]


def _prompt(settings: Settings) -> Queries:
    """The timed prompt's queries; all of them count."""
    return Queries(Profile({(settings.length, settings.length): 1}))


def _to_time(timed: Sequence[_Fit]) -> list[Pattern | Preset]:
    return [pattern for _, _, pattern, saturated in timed if not saturated]


def _time(
    timed: Sequence[_Fit], language: LanguageModel, settings: Settings, bar: Progress | None
) -> list[PrefillResult]:
    times = iter(
        prefill_times(
            language.model,
            _to_time(timed),
            length=settings.length,
            repeats=settings.repeats,
            backend=settings.backend,
            on_pass=None if bar is None else lambda: bar.update(settings.length),
        )
    )
    return [
        PrefillResult(
            method=method,
            budget=budget,
            pattern=str(pattern),
            saturated=saturated,
            w_eff=_measured(_prompt(settings), pattern, language).w_eff,
            milliseconds=[] if saturated else next(times),
        )
        for method, budget, pattern, saturated in timed
    ]


def _tokens(profile: Profile) -> int:
    return sum(queries * times for (queries, _), times in profile.items())
