"""`sattn estimator`: bias and variance as the window, the number of draws and the values grow, with fitted slopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ops.pattern import Pattern
from ..ops.validation import check_count, check_real
from ..plots import Curve, Panel, Point
from ..records import Estimate
from ..tables import markdown
from .estimator import (
    Problem,
    averages,
    fit_slope,
    full_attention,
    squared_bias,
    stochastic_draws,
    synthetic,
    uniform_key_draws,
    variance,
)

CORRECTIONS = (0.0, 0.5, 1.0)
AVERAGED = (1, 2, 4, 8, 16)
BOUNDS = (1.0, 2.0, 4.0)
_CLEAR = 2  # standard errors by which a squared bias must exceed zero to be shown and fitted
_NEAR = 0.1  # a slope this near to the predicted one, or within three standard errors of it, shows it


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    n: int
    windows: tuple[int, ...]
    local: int
    queries: int
    draws: int
    head_dim: int
    score_std: float
    bound: float
    memory: float
    seed: int

    def check(self) -> None:
        """Raise ValueError, before any work, for what cannot be measured."""
        check_count("n", self.n, minimum=2)
        if len(self.windows) < 3 or len(set(self.windows)) < len(self.windows):
            raise ValueError(f"windows must be at least three different ones, to fit a slope, got {self.windows}")
        for window in self.windows:
            check_count("windows", window, minimum=1, maximum=(self.n - 1) // 2)  # a block of n keys has no variance
        check_count("local", self.local, minimum=1, maximum=self.n - 1)
        check_count("queries", self.queries, minimum=2, maximum=self.n)
        check_count("draws", self.draws, minimum=2 * max(AVERAGED))
        check_count("head_dim", self.head_dim, minimum=1)
        check_count("seed", self.seed, minimum=0)
        check_real("score_std", self.score_std, minimum=0.0)
        check_real("memory", self.memory, minimum=0.0)
        check_real("bound", self.bound, above=0.0)

    def patterns(self, window: int) -> dict[str, Pattern]:
        """What is measured at each window, by name. Scope "prefix" is the same to a query that ends a whole level."""
        alone = {"sa": Pattern.stochastic(window), "sa-block": Pattern.stochastic(window, shape="block")}
        return alone | {
            f"union, correction {c:g}": Pattern.stochastic(window, local=self.local, correction=c) for c in CORRECTIONS
        }


@dataclass(frozen=True)
class Moments:
    """Squared bias and variance at `x`, a window, a number of averaged draws or a bound."""

    x: float
    squared_bias: Estimate
    variance: Estimate

    @property
    def bias(self) -> float | None:
        """The root of the squared bias; None where it does not stand out of the noise."""
        error = self.squared_bias.stderr or 0.0
        return math.sqrt(self.squared_bias.value) if self.squared_bias.value > _CLEAR * error else None


@dataclass(frozen=True)
class Series:
    """How moments change along one axis, with the slopes of log moments against log x.

    Attributes:
        name: of the pattern.
        target: "full" or "uniform-key".
        axis: "window", "draws" or "bound".
        moments: in order of x.
        bias_slope, variance_slope: fitted; None where fewer than three points stand out of the noise.
        predicted_bias_slope, predicted_variance_slope: what theory says.
    """

    name: str
    target: str
    axis: str
    moments: list[Moments]
    bias_slope: Estimate | None
    variance_slope: Estimate | None
    predicted_bias_slope: float
    predicted_variance_slope: float


def measure(settings: Settings, progress: Callable[[], object] = lambda: None) -> list[Series]:
    """Measure under checked settings; `progress` is called `work` times."""
    problem = _problem(settings, settings.bound)
    target = full_attention(problem)
    by_name: dict[tuple[str, str], list[Moments]] = {}
    for window in sorted(settings.windows):
        for name, pattern in settings.patterns(window).items():
            draws = stochastic_draws(problem, pattern, settings.draws)
            by_name.setdefault((name, "full"), []).append(_moments(window, draws, target))
            progress()
            if name == "sa":
                uniform = uniform_key_draws(problem, 2 * window - 1, settings.draws, seed=settings.seed)
                by_name.setdefault((name, "uniform-key"), []).append(_moments(window, draws, uniform))
                by_name.setdefault(("uniform keys", "full"), []).append(_moments(window, uniform, target))
                progress()
    series = [_series(name, of, "window", moments, (-1, -1)) for (name, of), moments in by_name.items()]
    middle = Pattern.stochastic(sorted(settings.windows)[len(settings.windows) // 2])
    draws = stochastic_draws(problem, middle, settings.draws)
    averaged = [_moments(count, averages(draws, count), target) for count in AVERAGED]
    series.append(_series("sa", "full", "draws", averaged, (0, -1)))
    progress()
    scaled = []
    for factor in BOUNDS:
        bounded = _problem(settings, factor * settings.bound)
        draws = stochastic_draws(bounded, middle, settings.draws)
        scaled.append(_moments(factor * settings.bound, draws, full_attention(bounded)))
        progress()
    series.append(_series("sa", "full", "bound", scaled, (1, 1)))
    return series


def work(settings: Settings) -> int:
    """How often `measure` calls `progress`."""
    return len(settings.windows) * (len(settings.patterns(1)) + 1) + 1 + len(BOUNDS)


def _problem(settings: Settings, bound: float) -> Problem:
    return synthetic(
        settings.n,
        settings.queries,
        head_dim=settings.head_dim,
        score_std=settings.score_std,
        bound=bound,
        memory=settings.memory,
        seed=settings.seed,
    )


def _moments(x: float, draws: Tensor, target: Tensor) -> Moments:
    return Moments(float(x), squared_bias(draws, target), variance(draws))


def _series(name: str, target: str, axis: str, moments: list[Moments], predicted: tuple[float, float]) -> Series:
    clear = [(m.x, m.bias) for m in moments if m.bias is not None]
    bias_slope = fit_slope([x for x, _ in clear], [y for _, y in clear])
    variance_slope = fit_slope([m.x for m in moments], [m.variance.value for m in moments])
    return Series(name, target, axis, moments, bias_slope, variance_slope, *predicted)


def shows(slope: Estimate | None, predicted: float) -> bool | None:
    """Whether a fitted slope is the predicted one, within 0.1 or three standard errors; None where there is none."""
    if slope is None:
        return None
    return abs(slope.value - predicted) <= max(_NEAR, 3 * (slope.stderr or 0.0))


def render(series: Sequence[Series], settings: Settings) -> str:
    """The slopes, then the moments they were fitted to, then how the problem was made."""
    slopes = [
        ["against", "estimate", "target", "bias slope", "predicted", "shows", "variance slope", "predicted", "shows"]
    ]
    moments = [["against", "estimate", "target", "at", "bias", "variance", "mean squared error"]]
    for one in series:
        names = [one.axis, one.name, one.target]
        row = list(names)
        for slope, predicted in (
            (one.bias_slope, one.predicted_bias_slope),
            (one.variance_slope, one.predicted_variance_slope),
        ):
            verdict = {True: "yes", False: "no", None: "-"}[shows(slope, predicted)]
            row += [_slope(slope), f"{predicted:g}", verdict]
        slopes.append(row)
        for m in one.moments:
            error = m.squared_bias.value + m.variance.value
            shown = "in the noise" if m.bias is None else f"{m.bias:.3g}"
            moments.append([*names, f"{m.x:g}", shown, f"{m.variance.value:.3g}", f"{error:.3g}"])
    return "\n".join([markdown(slopes), markdown(moments), _notes(settings)])


def _slope(slope: Estimate | None) -> str:
    return "-" if slope is None else f"{slope.value:.2f} ± {slope.stderr:.2f}"


def _notes(settings: Settings) -> str:
    notes = [
        f"n = {settings.n} keys, the last {settings.queries} positions as queries, {settings.draws} draws (steps and "
        f"heads that route apart), head dimension {settings.head_dim}, float64, causal. Unions hold the last "
        f"{settings.local} keys.",
        f"Keys: normal, correlated over positions by exp(-d / {settings.memory:g}). Values: {settings.bound:g} * "
        f"tanh(k W). Queries: normal; scores have standard deviation {settings.score_std:g}.",
        "bias: root of the mean square over queries and dimensions, the variance of the mean taken off. variance: of "
        "one draw, the same mean.",
        "Slopes: least squares on logarithms, ± standard error; shows: within 0.1 or three standard errors of the "
        "predicted one.",
    ]
    return "\n".join(f"- {note}" for note in notes) + "\n"


def panels(series: Sequence[Series]) -> list[Panel]:
    """Bias and variance against the window, on logarithmic axes."""
    bias, spread = [], []
    for colour, one in enumerate(one for one in series if one.axis == "window"):
        label = one.name if one.target == "full" else f"{one.name}, of {one.target}"
        bias.append(Curve(label, colour, [Point(m.x, m.bias, 0.0) for m in one.moments if m.bias is not None]))
        if one.target == "full":
            spread.append(Curve(label, colour, [Point(m.x, m.variance.value, 0.0) for m in one.moments]))
    return [
        Panel("bias", "root mean square", True, None, "", bias),
        Panel("variance of one draw", "mean square", True, None, "", spread),
    ]
