"""One run of lm-evaluation-harness over a task: its metrics, and what was found in each row."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.api.metrics import bits_per_byte, mean, weighted_perplexity
from lm_eval.evaluator import evaluate as run_harness

from ...records import Estimate
from ..tasks.base import ratio_perplexity

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from .lm import SwappedLM

# Resamplings of a metric whose standard error has no formula.
_BOOTSTRAP = 1000
# Draws the examples before a question: the harness's own default.
EXAMPLES_SEED = 1234


@dataclass(frozen=True)
class Found:
    """What a run found.

    Attributes:
        metrics: the harness's, by its names.
        rows: of each metric that is a mean over the rows, its value in every row, in their order.
        samples: of each row, and each filter of the task: "doc_id", "target", "responses", "filter" and "metrics".
    """

    metrics: dict[str, Estimate]
    rows: dict[str, list[float]]
    samples: list[dict[str, Any]]


def run_task(task: Task, lm: SwappedLM, limit: int | None, *, chat_template: bool = False) -> Found:
    """Run the rows of a task, the first `limit` of them, as questions to a chat model with its template or as text."""
    # Else the harness forks a process a core to resample a metric.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    name = str(task.task_name)
    task.set_fewshot_seed(seed=EXAMPLES_SEED)
    with quiet(), seeded():
        found: Any = run_harness(  # type: ignore[call-arg]
            lm=lm,  # type: ignore[arg-type]
            task_dict={"tasks": {name: task}, "groups": {}},  # type: ignore[arg-type]
            limit=limit,
            bootstrap_iters=_BOOTSTRAP,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
            confirm_run_unsafe_code=True,  # what is run has been checked
        )
    samples = sorted(found["samples"][name], key=itemgetter("doc_id"))
    facts, rows = found["results"][name], found["n-samples"][name]["effective"]
    metrics, values = _metrics(facts, rows, samples, task.aggregation())  # type: ignore[arg-type]
    return Found(metrics, values, [_sample(sample) for sample in samples])


def build_requests(task: Task, lm: SwappedLM, limit: int | None, *, chat_template: bool = False) -> None:
    """Make `task.instances` those of `run_task`."""
    task.set_fewshot_seed(seed=EXAMPLES_SEED)
    task.build_all_requests(
        limit=limit,
        apply_chat_template=chat_template,
        fewshot_as_multiturn=chat_template,
        chat_template=lm.apply_chat_template if chat_template else None,  # type: ignore[attr-defined]
        tokenizer_name=lm.tokenizer_name if chat_template else "",  # type: ignore[attr-defined]
    )


@contextmanager
def seeded() -> Iterator[None]:
    """Give all that draws the seeds of the harness's own `simple_evaluate`: some tasks shuffle answers, or sample text.

    What the caller draws afterwards is as if nothing had been drawn here.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        random.seed(0)
        np.random.seed(1234)
        torch.manual_seed(1234)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def quiet() -> Iterator[None]:
    """The harness tells much that is no concern of the reader's, some of it on standard output."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": sample["doc_id"],
        "target": sample["target"],
        "responses": sample["resps"],
        "filter": sample["filter"],
        "metrics": {name: sample[name] for name in sample["metrics"]},
    }


def _metrics(
    facts: Mapping[str, Any],
    n: int,
    samples: Sequence[Mapping[str, Any]],
    aggregation: Mapping[str, Callable[..., float]],
) -> tuple[dict[str, Estimate], dict[str, list[float]]]:
    estimates, values = {}, {}
    for key, value in facts.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        label = metric if filtered == "none" else key
        rows = [sample[metric] for sample in samples if sample["filter"] == filtered]
        stderr = facts.get(f"{metric}_stderr,{filtered}")
        if not isinstance(stderr, float):
            stderr = _ratio_stderr(aggregation[metric], rows)
        if aggregation[metric] is mean:
            values[label] = [float(row) for row in rows]
        estimates[label] = Estimate(float(value), stderr, n)
    return estimates, values


def _ratio_stderr(aggregation: Callable[..., float], rows: Sequence[Any]) -> float | None:
    """Of a metric that the harness makes from (log likelihood, weight) pairs; None for others."""
    if aggregation not in (weighted_perplexity, bits_per_byte) or len(rows) < 2:
        return None
    estimate = ratio_perplexity([-score for score, _ in rows], [weight for _, weight in rows])
    assert estimate.stderr is not None
    return estimate.stderr if aggregation is weighted_perplexity else estimate.stderr / estimate.value / math.log(2)
