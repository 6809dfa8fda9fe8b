"""Models compared by their losses on one text: which are run, what is kept, the table and the plot."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..hf import set_step
from ..lm.text import digest, text_path
from ..lm.token_file import Encoder
from ..models import LanguageModel, check_model, load_model, weights_digest
from ..ops.validation import check_choice, check_count, check_device
from ..plots import Curve, Panel, Point
from ..tables import markdown
from .compare import DTYPES
from .draws import has_chance
from .journal import Journal
from .token_losses import POSITION, REPEAT, Bucket, Window, buckets, cut, token_losses

X_LABEL = "tokens before it, or since its earlier copy"


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        text: a file as in training, or "embedded".
        length: tokens of a window.
        windows: how many, evenly spaced over the text; None: all.
        draws: routing steps, 0 and up, over which the losses of a model with stochastic layers are averaged.
    """

    text: str
    length: int = 1024
    windows: int | None = None
    draws: int = 1
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check every setting before any work starts."""
        if not text_path(self.text).is_file():
            raise ValueError(f"text must be a file, got {self.text!r}, which is none")
        check_count("length", self.length, minimum=3)
        if self.windows is not None:
            check_count("windows", self.windows, minimum=1)
        check_count("draws", self.draws, minimum=1)
        check_choice("dtype", self.dtype, DTYPES)
        check_device(self.device)


@dataclass(frozen=True)
class Named:
    """A model, and the kind that it stands for. Models of one kind differ by their training seed."""

    kind: str
    model: str

    @classmethod
    def parse(cls, text: str) -> Named:
        """Read KIND=MODEL, or MODEL, a kind of its own. ValueError where there is no such model."""
        kind, is_named, model = text.partition("=")
        if not kind or (is_named and not model):
            raise ValueError(f"models must be MODEL or KIND=MODEL, got {text!r}")
        named = cls(kind, model if is_named else text)
        check_model(named.model)
        return named


@dataclass(frozen=True)
class Outcome:
    """The finished measurement: the buckets of each model, in the order given."""

    config: dict[str, Any]
    models: list[tuple[Named, list[Bucket]]]

    def plain_results(self) -> dict[str, Any]:
        """As plain data, for a record."""
        return {
            "models": [
                {**asdict(named), "buckets": [asdict(bucket) for bucket in found]} for named, found in self.models
            ]
        }


def measure(
    settings: Settings,
    models: Sequence[Named],
    output: Path,
    *,
    batch_tokens: int = 4096,
    on_windows: Callable[[int, int], object] = lambda done, total: None,  # noqa: ARG005
) -> Outcome:
    """Measure the models that `output` does not hold yet, and return all.

    Args:
        settings: what to measure.
        models: which ones. A later call may name more.
        output: folder of the journal, models.jsonl.
        batch_tokens: most tokens of a batch. No figure depends on it.
        on_windows: called after each batch with the windows that it ran, and with those of the whole work as far as the
            model at hand tells.

    Raises:
        ValueError: tokenizers differ, so that a token of one model is none of another's; or windows are too long.
    """
    check_count("batch_tokens", batch_tokens, minimum=1)
    if not models or len(set(models)) < len(models):
        told = ", ".join(named.model for named in models) or "none"
        raise ValueError(f"models must be distinct and at least one, got {told}")
    keys = [f"{named.model} {weights_digest(named.model)}" for named in models]
    config = {**asdict(settings), "digest": digest([text_path(settings.text)])[:16], "version": __version__}
    journal = Journal(output / "models.jsonl", config)
    waiting = sum(key not in journal.done for key in keys)
    for named, key in zip(models, keys, strict=True):
        if key not in journal.done:
            language = load_model(named.model, device=settings.device, dtype=DTYPES[settings.dtype])
            windows = _windows(language, named.model, settings)
            tokens = _check_same(named, models[0], _digest(windows), journal.done.get(keys[0]))
            losses = _losses(language, windows, settings, batch_tokens, lambda done, n: on_windows(done, n * waiting))
            journal.add(key, {"tokens": tokens, "buckets": [asdict(found) for found in buckets(windows, losses)]})
        _check_same(named, models[0], journal.done[key]["tokens"], journal.done[keys[0]])
    found = [[Bucket.from_json(bucket) for bucket in journal.done[key]["buckets"]] for key in keys]
    return Outcome({**config, "models": [asdict(named) for named in models]}, list(zip(models, found, strict=True)))


def _windows(language: LanguageModel, model: str, settings: Settings) -> list[Window]:
    if language.longest is not None and settings.length - 1 > language.longest:
        raise ValueError(f"length must fit the {language.longest} positions of {model}, got {settings.length}")
    return cut(Encoder(language.tokenizer), settings.text, settings.length, settings.windows)


def _digest(windows: list[Window]) -> str:
    return hashlib.sha256(repr(windows).encode()).hexdigest()[:16]


def _check_same(named: Named, first: Named, tokens: str, done: dict[str, Any] | None) -> str:
    """The digest `tokens`, if that of the first model is the same."""
    if done is not None and done["tokens"] != tokens:
        raise ValueError(f"models must share a tokenizer, got other tokens from {named.model} than from {first.model}")
    return tokens


def _losses(
    language: LanguageModel,
    windows: list[Window],
    settings: Settings,
    batch_tokens: int,
    on_windows: Callable[[int, int], object],
) -> Tensor:
    """Of every token, the mean over the draws. float32 [windows, length - 1]."""
    steps = range(settings.draws if has_chance(language) else 1)
    losses = []
    for step in steps:
        if has_chance(language):
            set_step(language.model, step)
        losses.append(
            token_losses(
                language.model,
                windows,
                batch_tokens=batch_tokens,
                on_batch=lambda done: on_windows(done, len(windows) * len(steps)),
            )
        )
    return torch.stack(losses).mean(0)


def render(outcome: Outcome) -> str:
    """A line a bucket, a column a kind: the mean over its models, and their standard deviation."""
    kinds = _kinds(outcome)
    rows = [["", "tokens", *(f"{kind} ({len(models)})" if len(models) > 1 else kind for kind, models in kinds.items())]]
    first = outcome.models[0][1]
    for place, bucket in enumerate(first):
        cells = [_cell([found[place].perplexity.value for found in models]) for models in kinds.values()]
        rows.append([_name(bucket), str(bucket.tokens), *cells])
    errors = [f"{bucket.perplexity.stderr:.2g}" for bucket in first[:1] if bucket.perplexity.stderr is not None]
    notes = [
        "Perplexity a token, lower is better. In brackets: models of the kind, which differ in training; the mean over "
        "them, ± their standard deviation.",
        "position: tokens before it in its window. repeat: the two tokens before it occurred earlier, and the last "
        "time the same token followed, so many tokens ago; changed: another one did; new: they did not occur.",
        *(f"Standard error over the windows, of all tokens under the first model: {error}." for error in errors),
    ]
    return markdown(rows) + "\n" + "".join(f"- {note}\n" for note in notes)


def panels(outcome: Outcome) -> list[Panel]:
    """Perplexity by position, and of repeats by distance; a curve a kind, error bars as in the table."""
    titles = {POSITION: "by position", REPEAT: "repeats, by distance"}
    return [
        Panel(
            title=title,
            y_label="perplexity",
            y_is_log=True,
            reference=None,
            reference_label="",
            curves=[_curve(kind, place, of, models) for place, (kind, models) in enumerate(_kinds(outcome).items())],
        )
        for of, title in titles.items()
    ]


def _kinds(outcome: Outcome) -> dict[str, list[list[Bucket]]]:
    kinds: dict[str, list[list[Bucket]]] = {}
    for named, found in outcome.models:
        kinds.setdefault(named.kind, []).append(found)
    return kinds


def _name(bucket: Bucket) -> str:
    if not bucket.first:
        return bucket.kind
    return f"{bucket.kind} {bucket.first}" + (f"-{bucket.last}" if bucket.last > bucket.first else "")


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _curve(kind: str, colour: int, of: str, models: Sequence[Sequence[Bucket]]) -> Curve:
    points = []
    for same in zip(*models, strict=True):
        if same[0].kind == of:
            values = [bucket.perplexity.value for bucket in same]
            error = statistics.stdev(values) if len(values) > 1 else 0.0
            points.append(Point(math.sqrt(same[0].first * same[0].last), statistics.fmean(values), error))
    return Curve(kind, colour, points)
