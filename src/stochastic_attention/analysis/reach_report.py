"""`sattn reach`: the receptive fields of several patterns, summed up a layer, as a table and as curves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ops.validation import check_choice, check_count
from ..plots import Curve, Panel, Point
from ..records import Estimate
from ..tables import markdown
from .edges import PATTERNS
from .reach import (
    direct_fields,
    growth_layers,
    predicted_coverage,
    predicted_direct,
    predicted_layers,
    receptive_fields,
    sample_queries,
    standard_error,
)

SHARES = (0.5, 0.99, 1.0)
_EXACT_UP_TO = 4096  # tokens: below this, the fields of all queries are cheap
_SAMPLE = 256
_STRETCHES = 16


@dataclass(frozen=True)
class Settings:
    """What to measure. `queries` None: all up to 4,096 tokens, else 256."""

    n: int
    window: int
    layers: int
    patterns: tuple[str, ...]
    causal: bool
    queries: int | None
    seeds: int

    def checked(self) -> Settings:
        """Itself with `queries` filled in; ValueError, before any work, for what cannot be measured."""
        for name in ("n", "window", "layers", "seeds"):
            check_count(name, getattr(self, name), minimum=1)
        if not self.patterns:
            raise ValueError("patterns must name at least one pattern, got none")
        for name in self.patterns:
            check_choice("patterns", name, PATTERNS)
            PATTERNS[name](self.window).check_causal(self.causal)
        queries = self.queries
        if queries is None:
            queries = self.n if self.n <= _EXACT_UP_TO else _SAMPLE
        check_count("queries", queries, minimum=min(3, self.n), maximum=self.n)  # fewer tell no standard error
        return replace(self, queries=queries)


@dataclass(frozen=True)
class LayerReach:
    """Coverage through `layers` layers.

    Attributes:
        layers: how many.
        coverage: mean over queries and seeds; its standard error is that of sampling queries, 0 where all were taken.
        spread: standard deviation over seeds of the mean; None for one seed or a pattern without chance.
        minimum: of the least covered query, over all seeds.
        predicted: the mean in closed form, where there is one.
        direct: mean share of the sources that are met in one hop; predicted_direct: 1 - (1 - p)^layers. None for
            patterns without chance.
        by_position: mean over the queries of each stretch of positions, see `PatternReach.positions`.
    """

    layers: int
    coverage: Estimate
    spread: float | None
    minimum: float
    predicted: float | None
    direct: float | None
    predicted_direct: float | None
    by_position: list[float]


@dataclass(frozen=True)
class PatternReach:
    """A pattern's reach.

    Attributes:
        name, pattern: the command's name for it, and what it stands for.
        keys: mean abs(N(i)) over the queries.
        layers: through 1, 2, ... layers.
        layers_to: the first of `layers` at which mean coverage is at least .5 and .99, and at which every query's is 1
            ("1.0"); None: not within them.
        predicted_layers, growth_layers: to full coverage, see `reach.predicted_layers` and `reach.growth_layers`.
        positions: mean position of the queries of each stretch.
        seconds: to measure.
    """

    name: str
    pattern: str
    keys: float
    layers: list[LayerReach]
    layers_to: dict[str, int | None]
    predicted_layers: float | None
    growth_layers: float | None
    positions: list[float]
    seconds: float


def measure(settings: Settings, name: str, progress: Callable[[int], object] = lambda _: None) -> PatternReach:
    """Measure one pattern under checked settings; `progress` is told of fields x layers, see `work`."""
    begin = time.perf_counter()
    n, layers, causal = settings.n, settings.layers, settings.causal
    assert settings.queries is not None
    queries = sample_queries(n, settings.queries)
    few = sample_queries(n, min(settings.queries, _SAMPLE))  # one hop is looked up a query at a time
    first = PATTERNS[name](settings.window)
    runs, direct = [], []
    for seed in range(_seeds(settings, name)):
        pattern = replace(first, seed=seed) if first.is_random else first
        runs.append(receptive_fields(pattern, n, layers, queries, causal=causal, seed=seed, progress=progress))
        if first.is_random:
            direct.append(direct_fields(pattern, n, layers, few, causal=causal).coverage.mean(1))
    coverage = np.stack([run.coverage for run in runs])  # [seeds, layers, Q]
    predicted = predicted_coverage(first, n, layers, queries, causal=causal)
    met = predicted_direct(first, n, layers, few, causal=causal) if first.is_random else None
    stretches = np.array_split(np.arange(len(queries)), min(_STRETCHES, len(queries)))
    by_layer = []
    for k in range(layers):
        of_query = coverage[:, k].mean(0)
        by_layer.append(
            LayerReach(
                layers=k + 1,
                coverage=Estimate(float(of_query.mean()), standard_error(of_query, n), len(queries)),
                spread=statistics.stdev(coverage[:, k].mean(1).tolist()) if len(runs) > 1 else None,
                minimum=float(coverage[:, k].min()),
                predicted=None if predicted is None else float(predicted[k].mean()),
                direct=float(np.mean([run[k] for run in direct])) if direct else None,
                predicted_direct=None if met is None else float(met[k].mean()),
                by_position=[float(of_query[part].mean()) for part in stretches],
            )
        )
    return PatternReach(
        name=name,
        pattern=str(first),
        keys=float(np.mean([run.sizes[0].mean() for run in runs])),
        layers=by_layer,
        layers_to={str(share): _layers_to(by_layer, share) for share in SHARES},
        predicted_layers=predicted_layers(first, n, causal=causal),
        growth_layers=growth_layers(first, n),
        positions=[float(queries[part].mean()) for part in stretches],
        seconds=time.perf_counter() - begin,
    )


def work(settings: Settings) -> int:
    """Fields x layers of all patterns of checked settings, what `progress` counts."""
    assert settings.queries is not None
    return sum(_seeds(settings, name) for name in settings.patterns) * settings.layers * settings.queries


def _seeds(settings: Settings, name: str) -> int:
    pattern = PATTERNS[name](settings.window)
    return settings.seeds if pattern.is_random or pattern.kind == "moba" else 1


def _layers_to(by_layer: Sequence[LayerReach], share: float) -> int | None:
    for reach in by_layer:
        if (reach.minimum if share == 1.0 else reach.coverage.value) >= share:
            return reach.layers
    return None


def render(results: Sequence[PatternReach], settings: Settings) -> str:
    """How deep each pattern must be, then coverage layer by layer until every query has all, then the definitions."""
    depths = [
        ["pattern", "keys a query", *(f"layers to {share:.0%}" for share in SHARES), "closed form", "log n / log 2w"]
    ]
    coverage = [["pattern", "layers", "mean", "closed form", "least", "one hop", "1 - (1 - p)^k"]]
    for result in results:
        within = [result.layers_to[str(share)] for share in SHARES]
        depths.append(
            [
                result.name,
                f"{result.keys:.1f}",
                *(f"> {settings.layers}" if k is None else str(k) for k in within),
                _number(result.predicted_layers, "{:.4g}"),
                _number(result.growth_layers, "{:.2f}"),
            ]
        )
        for reach in result.layers[: within[-1]]:
            if not _is_shown(reach.layers, last=within[-1] or settings.layers):
                continue
            spread = "" if reach.spread is None else f" ± {reach.spread:.4f}"
            figures = (reach.predicted, reach.minimum, reach.direct, reach.predicted_direct)
            mean = f"{reach.coverage.value:.4f}{spread}"
            coverage.append([result.name, str(reach.layers), mean, *(_number(x, "{:.4f}") for x in figures)])
    return "\n".join([markdown(depths), markdown(coverage), _notes(results, settings)])


def _is_shown(layers: int, last: int) -> bool:
    """The first dozen layers, then those of about equal ratios, and the last."""
    octave = 1 << layers.bit_length() - 3 if layers > 12 else 1
    return layers % octave == 0 or layers == last


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _notes(results: Sequence[PatternReach], settings: Settings) -> str:
    direction, sources = ("causal", "the j <= i") if settings.causal else ("bidirectional", f"all {settings.n}")
    notes = [
        f"n = {settings.n}, window = {settings.window}, {direction}. Coverage of query i: the share of {sources} "
        "tokens that can influence it; 100% means every query measured.",
    ]
    if settings.queries == settings.n:
        notes.append("Exact: the fields of all queries.")
    else:
        errors = [reach.coverage.stderr or 0.0 for result in results for reach in result.layers]
        notes.append(
            f"A sample: the exact fields of {settings.queries} queries spread over all positions; the standard error "
            f"of a mean over them is at most {max(errors):.4f}, and the least is the least of these."
        )
    if settings.seeds > 1:
        notes.append(f"±: standard deviation over {settings.seeds} routing seeds.")
    if any(result.name == "moba" for result in results):
        notes.append("moba: its choice by content modelled as random: the own block and random past blocks.")
    return "\n".join(f"- {note}" for note in notes) + "\n"


def panels(results: Sequence[PatternReach]) -> list[Panel]:
    """Coverage against layers: its mean, with the closed forms, and that of the least covered query."""
    mean, least = [], []
    for colour, result in enumerate(results):
        of_mean = [Point(x.layers, x.coverage.value, x.spread or 0.0) for x in result.layers]
        mean.append(Curve(result.name, colour, of_mean))
        least.append(Curve(result.name, colour, [Point(x.layers, x.minimum, 0.0) for x in result.layers]))
        predicted = [Point(x.layers, x.predicted, 0.0) for x in result.layers if x.predicted is not None]
        if predicted and any(x.predicted != x.coverage.value for x in result.layers):
            mean.append(Curve("closed form", colour, predicted, is_closed_form=True))
    return [
        Panel("mean over queries", "coverage", False, 1.0, "everything", mean),
        Panel("least covered query", "coverage", False, 1.0, "everything", least),
    ]


def position_panels(results: Sequence[PatternReach], depths: Sequence[int]) -> list[Panel]:
    """Coverage against the query's position, a panel for each number of layers."""
    return [
        Panel(
            f"through {depth} layer{'s' if depth > 1 else ''}",
            "coverage",
            False,
            1.0,
            "everything",
            [
                Curve(
                    result.name,
                    colour,
                    [
                        Point(x + 1, y, 0.0)
                        for x, y in zip(result.positions, result.layers[depth - 1].by_position, strict=True)
                    ],
                )
                for colour, result in enumerate(results)
            ],
        )
        for depth in depths
    ]
