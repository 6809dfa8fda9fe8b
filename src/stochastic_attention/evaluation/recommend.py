"""The best union of patterns for a model, a budget and a text: a search, then a comparison of its finalists."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..hf.presets import Preset, save_preset
from ..models import LanguageModel, load_model
from ..ops.pattern import Pattern
from ..ops.validation import check_count
from .budget import Queries
from .candidates import Candidate, draw_candidates
from .compare import DTYPES, Outcome, Progress, Settings, compare, config_of, items_of
from .halving import halve, rungs
from .journal import Journal
from .methods import PRESET, REFERENCE
from .prefill import attending
from .requests import Item, profile
from .results import Summary, summarise
from .scoring import score_requests
from .tasks import TASKS

# Of a preset on some items: minus the log likelihood of their right answers.
Loss = Callable[[Preset, Sequence[Item]], float]


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        preset: the best finalist by the mean of the first task's headline metric.
        method: its name in the outcome.
        finalists: what the presets compared are, by their names in the outcome; the best of the search first.
        outcome: finalists and baselines at the same budget, over seeds.
    """

    preset: Preset
    method: str
    finalists: dict[str, Candidate]
    outcome: Outcome


def recommend(
    settings: Settings,
    output: Path,
    *,
    candidates: int = 54,
    finalists: int = 3,
    batch_tokens: int = 4096,
    progress: Callable[[], Progress] | None = None,
    load: Callable[..., LanguageModel] = load_model,
    loss: Loss | None = None,
) -> Recommendation:
    """Search `candidates` by successive halving, then compare the finalists. Resumes from what `output` holds.

    The items that choose are those of the comparison, which flatters the choice: judge a preset on other text.

    Args:
        settings: those of the final comparison, with one budget. Its first task is what is searched by, with seed 0 and
            by the likelihood of the right answers; its methods are the baselines.
        output: folder of the journals and of the finalists' presets.
        candidates: how many of the grid take part (see `draw_candidates`).
        finalists: how many are compared over all seeds.
        batch_tokens, progress, load: see `compare`.
        loss: what the search makes small, if not that.

    Raises:
        ValueError: an argument is out of its domain, or `output` holds a search with other settings.
    """
    if len(settings.budgets) != 1:
        raise ValueError(f"budgets must be one for a recommendation, got {', '.join(map(str, settings.budgets))}")
    (budget,) = settings.budgets
    check_count("finalists", finalists, minimum=1)
    check_count("batch_tokens", batch_tokens, minimum=1)
    drawn = draw_candidates(candidates, budget)
    language = load(settings.model, device=settings.device, dtype=DTYPES[settings.dtype])
    items = items_of(settings, language)
    # Rungs see a part of the items: one from anywhere in the text rather than its beginning.
    objective = random.Random(0).sample(items[settings.tasks[0]], settings.limits[0])
    queries = Queries(profile(request for item in objective for request in item.requests))
    most = queries.expected_mean(Pattern.full(), settings.match)
    if most <= budget:
        raise ValueError(
            f"budget must be below the {most:.1f} keys of full attention on {settings.tasks[0]}, got {budget}"
        )

    journal = Journal(
        output / "search.jsonl", {**config_of(settings, items), "candidates": candidates, "finalists": finalists}
    )
    steps = rungs(candidates, len(objective), finalists)
    bar = progress() if progress is not None and steps else None
    if bar is not None:
        bar.total = sum(step.entrants * _tokens(objective[step.windows.start : step.windows.stop]) for step in steps)
        bar.set_description("search")
    loss = loss or _loss_of(language, settings.backend, batch_tokens)

    def loss_on(candidate: Candidate, windows: range) -> float:
        key = f"{candidate}: windows {windows.start} to {windows.stop}"
        seen = objective[windows.start : windows.stop]
        if key not in journal.done:
            journal.add(key, loss(candidate.preset(queries, budget, settings.match, language.layers), seen))
        if bar is not None:
            bar.update(_tokens(seen))
        return journal.done[key]

    chosen: dict[str, Candidate] = {}
    for place, candidate in enumerate(halve(drawn, steps, finalists, loss_on), start=1):
        path = output / f"finalist-{place}.json"
        save_preset(path, str(candidate), candidate.preset(queries, budget, settings.match, language.layers))
        chosen[f"{PRESET}{path}"] = candidate
    outcome = compare(
        replace(settings, methods=(*settings.methods, *chosen)),
        output,
        batch_tokens=batch_tokens,
        progress=progress,
        load=lambda *_, **__: language,
    )
    best = _best(outcome, settings.tasks[0], chosen)
    preset = chosen[best].preset(queries, budget, settings.match, language.layers)
    return Recommendation(preset, best, chosen, outcome)


def figures(outcome: Outcome, task: str, method: str) -> Summary:
    """A method's headline metric on a task, over seeds."""
    cells = [cell for cell in outcome.cells if (cell.task, cell.method) == (task, method)]
    return summarise(cells, TASKS[task].headline)


def verdict(found: Recommendation, baseline: str) -> str:
    """What the comparison says, in words: each task of the recommended preset beside a baseline and full attention."""
    lines = [f"Recommended: {found.finalists[found.method]}.", f"Layers: {found.preset}."]
    for task in dict.fromkeys(cell.task for cell in found.outcome.cells):
        told = [
            f"{name} {_told(figures(found.outcome, task, method))}"
            for name, method in (("it", found.method), (baseline, baseline), (REFERENCE, REFERENCE))
        ]
        lines.append(f"{task}, {TASKS[task].headline}: {', '.join(told)}.")
    return "\n".join(lines)


def _told(summary: Summary) -> str:
    if summary.value is None:
        return "saturated"
    spread = "" if summary.spread is None else f" ± {summary.spread:.3g}"
    return f"{summary.value:.4g}{spread} at w_scored {summary.w_scored:.1f}"


def _best(outcome: Outcome, task: str, methods: Iterable[str]) -> str:
    sign = -1 if TASKS[task].higher_is_better else 1

    def rank(method: str) -> float:
        value = figures(outcome, task, method).value
        assert value is not None  # a preset is never saturated
        return sign * value

    return min(methods, key=rank)


def _loss_of(language: LanguageModel, backend: str | None, batch_tokens: int) -> Loss:
    def loss(preset: Preset, items: Sequence[Item]) -> float:
        requests = [item.requests[item.answer] for item in items]
        with attending(language.model, preset, backend):
            scores = score_requests(language.model, requests, batch_tokens=batch_tokens)
        return -math.fsum(score.loglikelihood for score in scores)

    return loss


def _tokens(items: Sequence[Item]) -> int:
    return sum(item.requests[item.answer].queries for item in items)
