"""Zero-shot evaluation by lm-evaluation-harness, task by task and resumable: a model as it is, or under a method."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from lm_eval.api.metrics import bits_per_byte, weighted_perplexity
from lm_eval.evaluator import evaluate as run_harness

from .. import __version__
from ..hf import set_step
from ..hf.plan import check_swappable
from ..lm.text import digest
from ..models import LanguageModel, check_model, load_model, weights_digest
from ..ops.backends import backend_names
from ..ops.pattern import Pattern
from ..ops.validation import check_choice, check_count, check_device
from ..records import Estimate
from .budget import Match, Queries
from .compare import DTYPES
from .draws import has_chance
from .eval_tasks import Source, check_names, find_sources, load_task, task_manager
from .harness import SwappedLM
from .journal import Journal
from .methods import METHODS
from .prefill import attending
from .requests import Profile
from .tasks.base import ratio_perplexity

if TYPE_CHECKING:
    from lm_eval.api.task import Task

Model = TypeVar("Model", bound=SwappedLM)
# Resamplings of a metric whose standard error has no formula.
_BOOTSTRAP = 1000


@dataclass(frozen=True)
class Settings:
    """What to evaluate. Two runs with equal settings give equal figures, times aside.

    Attributes:
        model: see `load_model`.
        tasks: single tasks of the harness.
        method, budget, match: a method of `METHODS`, set for each task to the budget; None: the model as it is.
        seeds: draws of what is random: routing seeds of the method, or routing steps, 0 and up, of a model that has
            stochastic layers itself.
        limit: rows of each task, from the first, None for all.
        length: most tokens of a window; longer texts are cut, at the left or into rolling windows. None: the model's
            own.
        data: a folder with the rows of tasks.
        offline: whether rows may only come from this machine.
    """

    model: str
    tasks: tuple[str, ...]
    method: str | None = None
    budget: int | None = None
    match: Match = "w_scored"
    seeds: int = 1
    limit: int | None = None
    length: int | None = None
    data: Path | None = None
    offline: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check every setting before any work starts."""
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks must be distinct and at least one, got {', '.join(self.tasks) or 'none'}")
        if self.method is not None:
            check_choice("method", self.method, METHODS)
        if (self.method in (None, "full")) != (self.budget is None):
            raise ValueError(
                f"budget must be given with a method other than full, got {self.budget} with {self.method}"
            )
        if self.backend is not None:
            check_choice("backend", self.backend, backend_names())
            if self.method is None:
                raise ValueError("backend must be given with a method, which it runs, got none")
        for name in ("budget", "limit", "length"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum=1)
        check_count("seeds", self.seeds, minimum=1)
        check_choice("match", self.match, get_args(Match))
        check_choice("dtype", self.dtype, DTYPES)
        check_device(self.device)
        check_model(self.model)
        find_sources(self.tasks, self.data, self.offline)


@dataclass(frozen=True)
class Result:
    """One task under one draw.

    Attributes:
        seed: the draw, None where nothing is random.
        pattern: what every layer ran in place of its own attention, in words; None: the model as it is.
        w_eff, w_scored: measured mean keys over all queries, and over the scored ones; None for the model as it is.
        metrics: the harness's, by its names.
    """

    task: str
    seed: int | None
    pattern: str | None
    w_eff: float | None
    w_scored: float | None
    metrics: dict[str, Estimate]
    seconds: float

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Result:
        """Read what `dataclasses.asdict` made."""
        metrics = {name: Estimate(**estimate) for name, estimate in facts["metrics"].items()}
        return cls(**{**facts, "metrics": metrics})


@dataclass(frozen=True)
class Outcome:
    """The finished evaluation."""

    config: dict[str, Any]
    results: list[Result]

    def plain_results(self) -> dict[str, Any]:
        """As plain data, for a record."""
        return {"tasks": [asdict(result) for result in self.results]}


def evaluate(settings: Settings, output: Path, *, batch_size: int = 8) -> Outcome:
    """Run what `output` does not hold yet, and return all of it.

    Args:
        settings: what to evaluate.
        output: folder of the journal, tasks.jsonl.
        batch_size: rows of a batch. No score depends on it, so a resumed run may change it.
    """
    check_count("batch_size", batch_size, minimum=1)
    sources = find_sources(settings.tasks, settings.data, settings.offline)
    manager = task_manager(settings.tasks)
    check_names(settings.tasks, manager)
    config = _config(settings, sources)
    journal = Journal(output / "tasks.jsonl", config)

    # Every task is loaded, and its rows are there, before the first one runs.
    with _quiet():
        waiting = {name: load_task(name, sources[name], manager) for name in settings.tasks if name not in journal.done}
    if waiting:
        language = load_model(settings.model, device=settings.device, dtype=DTYPES[settings.dtype])
        for name, task in waiting.items():
            journal.add(name, [asdict(result) for result in _run(task, settings, language, batch_size)])
    return Outcome(config, [Result.from_json(facts) for name in settings.tasks for facts in journal.done[name]])


def _run(task: Task, settings: Settings, language: LanguageModel, batch_size: int) -> Iterator[Result]:
    """The task under every draw."""
    if settings.length is not None and language.longest is not None and settings.length > language.longest:
        raise ValueError(f"length must fit the model's {language.longest} positions, got {settings.length}")
    lm = _silently(SwappedLM, language, settings, batch_size)
    if settings.method is None:
        for step in range(settings.seeds) if has_chance(language) else (None,):
            if step is not None:
                set_step(language.model, step)
            yield _timed(task, settings, lm, seed=step)
        return
    check_swappable(language.model.config)
    method = METHODS[settings.method]
    queries = Queries(_profile(task, settings, language))
    fitted = Pattern.full() if settings.budget is None else method.fit(queries, settings.budget, settings.match)
    for seed in range(settings.seeds) if method.is_random else (None,):
        pattern = fitted if seed is None else fitted.seeded(seed)
        with attending(language.model, pattern, settings.backend):
            result = _timed(task, settings, lm, seed=seed)
        budget = queries.measured(pattern, language.layers)
        yield replace(result, pattern=str(pattern), w_eff=budget.w_eff, w_scored=budget.w_scored)


def _timed(task: Task, settings: Settings, lm: SwappedLM, seed: int | None) -> Result:
    start = time.perf_counter()
    # Else the harness forks a process a core to resample a metric.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    name = str(task.task_name)
    with _quiet():
        found: Any = run_harness(  # type: ignore[call-arg]
            lm=lm,  # type: ignore[arg-type]
            task_dict={"tasks": {name: task}, "groups": {}},  # type: ignore[arg-type]
            limit=settings.limit,
            bootstrap_iters=_BOOTSTRAP,
        )
    return Result(name, seed, None, None, None, _metrics(task, found), time.perf_counter() - start)


def _metrics(task: Task, found: Mapping[str, Any]) -> dict[str, Estimate]:
    name = str(task.task_name)
    facts, samples = found["results"][name], found["samples"][name]
    estimates = {}
    for key, value in facts.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        stderr = facts.get(f"{metric}_stderr,{filtered}")
        if not isinstance(stderr, float):
            rows = [sample[metric] for sample in samples if sample["filter"] == filtered]
            stderr = _ratio_stderr(task.aggregation()[metric], rows)  # type: ignore[index]
        label = metric if filtered == "none" else key
        estimates[label] = Estimate(float(value), stderr, found["n-samples"][name]["effective"])
    return estimates


def _ratio_stderr(aggregation: Callable[..., float], rows: Sequence[Any]) -> float | None:
    """Of a metric that the harness makes from (log likelihood, weight) pairs; None for others."""
    if aggregation not in (weighted_perplexity, bits_per_byte) or len(rows) < 2:
        return None
    estimate = ratio_perplexity([-score for score, _ in rows], [weight for _, weight in rows])
    assert estimate.stderr is not None
    return estimate.stderr if aggregation is weighted_perplexity else estimate.stderr / estimate.value / math.log(2)


class _Lengths(SwappedLM):
    """A model that runs nothing, and counts how many tokens it would have run and scored."""

    lengths: Profile

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        *_: object,
        **__: object,
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            queries = min(len(context) + len(continuation) - 1, self.max_length)  # type: ignore[attr-defined]
            self.lengths[queries, min(len(continuation), queries)] += 1
        return [(0.0, False)] * len(requests)


def _profile(task: Task, settings: Settings, language: LanguageModel) -> Profile:
    lm = _silently(_Lengths, language, settings, 1)
    lm.lengths = Profile()
    task.build_all_requests(limit=settings.limit, rank=0, world_size=1)
    for instance in task.instances:
        if instance.request_type not in ("loglikelihood", "loglikelihood_rolling"):
            raise ValueError(
                f"{task.task_name} generates text: which keys it will need is not known, so no budget can be met"
            )
        getattr(lm, instance.request_type)([instance], disable_tqdm=True)
    return lm.lengths


def _silently(kind: type[Model], language: LanguageModel, settings: Settings, batch_size: int) -> Model:
    with _quiet():
        options: Any = {"batch_size": batch_size, "max_length": settings.length}
        return kind(pretrained=language.model, tokenizer=language.tokenizer, **options)  # type: ignore[call-arg]


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness tells much that is no concern of the reader's, some of it on standard output."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _config(settings: Settings, sources: Mapping[str, Source]) -> dict[str, Any]:
    """All that the figures depend on."""
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    del facts["offline"]
    return {
        **facts,
        "sources": {name: source.words for name, source in sources.items()},
        "digests": {
            name: digest([source.path])[:16]
            for name, source in sources.items()
            if source.path and source.path.is_file()
        },
        "weights": weights_digest(settings.model),
        "version": __version__,
        "lm_eval": version("lm_eval"),
    }
