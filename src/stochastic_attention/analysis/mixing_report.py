"""`sattn mixing`: how fast several patterns mix, over seeds, as a table and as curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ops.validation import check_choice, check_count
from ..plots import Curve, Panel, Point
from ..tables import markdown
from .edges import PATTERNS
from .mixing import distances, kept, path_gap, path_mixing_time, ring_gap, spectral_gap, transition

LEVEL = 0.25  # the usual level of a mixing time
DEPTHS = (1, 2, 4, 8)
NAMES = ("swa", "sa", "sa-block", "gated", "gated-half")


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    n: int
    window: int
    patterns: tuple[str, ...]
    seeds: int
    starts: int
    limit: int

    def check(self) -> None:
        """Raise ValueError, before any work, for what cannot be measured."""
        for name in ("window", "seeds", "limit"):
            check_count(name, getattr(self, name), minimum=1)
        check_count("n", self.n, minimum=2 * self.window + 1)
        check_count("starts", self.starts, minimum=2, maximum=self.n)
        if not self.patterns:
            raise ValueError("patterns must name at least one pattern, got none")
        for name in self.patterns:
            check_choice("patterns", name, NAMES)


@dataclass(frozen=True)
class PatternMixing:
    """How a pattern mixes; lists are over seeds, one entry for a pattern without chance.

    Attributes:
        name, pattern: the command's name for it, and what it stands for.
        keys: mean abs(N(i)) of layer 0.
        gap: `spectral_gap` of layer 0 alone, repeated for ever.
        kept: by number of layers, `mixing.kept` of that many different ones.
        distance: total variation after 1, 2, ... layers.
        time: layers until it is at most 1/4, None where the limit came first.
    """

    name: str
    pattern: str
    keys: float
    gap: list[float]
    kept: dict[int, list[float]]
    distance: list[list[float]]
    time: list[int | None]


def measure(settings: Settings, name: str, progress: Callable[[], object] = lambda: None) -> PatternMixing:
    """Measure one pattern; `progress` is called after every seed."""
    first = PATTERNS[name](settings.window)
    between = np.random.default_rng(0).choice(np.arange(1, settings.n - 1), settings.starts - 2, replace=False)
    starts = np.array([0, settings.n - 1, *between])  # the ends of a path are its slowest starts
    gaps, keys, runs = [], [], []
    kept_by_depth: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for seed in range(runs_of(settings, name)):
        pattern = replace(first, seed=seed) if first.is_random else first
        layers = [transition(pattern, settings.n, layer=layer) for layer in range(max(DEPTHS))]
        keys.append(layers[0].nnz / settings.n)
        gaps.append(spectral_gap(layers[0]))
        for depth in DEPTHS:
            kept_by_depth[depth].append(kept(layers[:depth]))
        runs.append(distances(pattern, settings.n, starts, level=LEVEL, limit=settings.limit))
        progress()
    times = [len(run) if run[-1] <= LEVEL else None for run in runs]
    return PatternMixing(name, str(first), statistics.mean(keys), gaps, kept_by_depth, runs, times)


def runs_of(settings: Settings, name: str) -> int:
    """Seeds that a pattern is measured with."""
    return settings.seeds if PATTERNS[name](settings.window).is_random else 1


def closed_forms(settings: Settings) -> dict[str, float]:
    """Of the sliding window, by name."""
    return {
        "ring gap": ring_gap(settings.n, settings.window),
        "path gap": path_gap(settings.n, settings.window),
        "path mixing time": path_mixing_time(settings.n, settings.window),
    }


def render(results: Sequence[PatternMixing], settings: Settings) -> str:
    """A line a pattern, and the definitions."""
    last = max(DEPTHS)
    header = ["pattern", "keys a query", "gap of one layer", *(f"kept by {d}" for d in DEPTHS)]
    rows = [[*header, f"gap a layer, of {last}", "layers to mix"]]
    for result in results:
        each = [1 - x ** (1 / last) for x in result.kept[last]]
        rows.append(
            [
                result.name,
                f"{result.keys:.1f}",
                _spread(result.gap, "{:.3g}"),
                *(_spread(result.kept[depth], "{:.2g}") for depth in DEPTHS),
                _spread(each, "{:.3g}"),
                _times(result.time, settings.limit),
            ]
        )
    closed = closed_forms(settings)
    notes = [
        f"n = {settings.n}, window = {settings.window}, bidirectional, equal weights on all keys. A cell: mean ± "
        f"standard deviation over {settings.seeds} seeds.",
        "gap of one layer: of that layer repeated for ever. kept by k: the most that k different layers leave of a "
        "zero-mean vector's length; gap a layer: 1 - kept^(1/k).",
        f"layers to mix: until total variation is at most {LEVEL} from the worst of {settings.starts} starts, both "
        "ends among them.",
        f"Closed forms for swa: gap {closed['ring gap']:.3g} on a ring, {closed['path gap']:.3g} on a path with "
        f"reflecting ends, which mixes in {closed['path mixing time']:.1f} layers.",
    ]
    return markdown(rows) + "\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.mean(values))
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.1g}"


def _times(times: Sequence[int | None], limit: int) -> str:
    found = [time for time in times if time is not None]
    if len(found) < len(times):
        return f"> {limit}"
    low, high = min(found), max(found)
    return str(low) if low == high else f"{low} to {high}"


def panels(results: Sequence[PatternMixing]) -> list[Panel]:
    """Total variation against layers, of the first seed."""
    curves = []
    for colour, result in enumerate(results):
        run = result.distance[0]
        # On a logarithmic axis, a hundred points say as much as thousands.
        shown = sorted({round(k) for k in np.geomspace(1, len(run), 100)})
        curves.append(Curve(result.name, colour, [Point(k, run[k - 1], 0.0) for k in shown]))
    return [Panel("worst start", "total variation", False, LEVEL, "mixed", curves)]
