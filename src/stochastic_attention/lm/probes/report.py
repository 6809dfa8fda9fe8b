"""Trained probes summed up over seeds: as a table, and as curves of accuracy against distance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from ...plots import Curve, Panel, Point
from ...tables import markdown
from .cells import Cell, Settings
from .training import ProbeResult

Results = Sequence[tuple[Cell, ProbeResult]]


def render(results: Results, settings: Settings) -> str:
    """What each kind answers, and which of its answers have a path; then accuracy by distance; then the definitions."""
    distances = list(dict.fromkeys(key for _, result in results for key in result.by_distance))
    distances.sort(key=int)
    head = ["attention", "layers", "w_scored (w_eff)", "accuracy", "fixed step", "direct", "closed form", "right"]
    paths = [[*head, "field", "right", "beyond", "right", "steps"]]
    reach = [["attention", "layers", *distances]]
    for (name, layers), runs in _by_model(results).items():
        paths.append(
            [
                name,
                str(layers),
                f"{_mean(r.w_scored for r in runs):.1f} ({_mean(r.w_eff for r in runs):.1f})",
                _spread(r.accuracy for r in runs),
                _spread(r.accuracy_fixed for r in runs),
                _share(runs, lambda r: r.direct.count),
                f"{_mean(r.expected_direct for r in runs):.3f}",
                _spread(r.direct.accuracy for r in runs),
                _share(runs, lambda r: r.field.count),
                _spread(r.field.accuracy for r in runs),
                _share(runs, lambda r: r.beyond.count),
                _spread(r.beyond.accuracy for r in runs),
                "/".join(str(r.steps) for r in runs),
            ]
        )
        accuracy = {d: [r.by_distance[d].accuracy for r in runs if d in r.by_distance] for d in distances}
        reach.append([name, str(layers), *(_spread(accuracy[d]) for d in distances)])
    return "\n".join(
        [markdown(paths), "Accuracy by distance, from the one named to just before the next:\n"]
    ) + "\n".join(["", markdown(reach), _notes(settings)])


def panels(results: Results) -> list[Panel]:
    """Accuracy against the distance of the answer, a panel a depth."""
    models = _by_model(results)
    names = list(dict.fromkeys(name for name, _ in models))
    return [
        Panel(
            title=f"{depth} layers" if depth > 1 else "1 layer",
            y_label="accuracy",
            y_is_log=False,
            reference=None,
            reference_label="",
            curves=[
                Curve(name, names.index(name), _points(runs))
                for (name, layers), runs in models.items()
                if layers == depth
            ],
        )
        for depth in sorted({layers for _, layers in models})
    ]


def _points(runs: Sequence[ProbeResult]) -> list[Point]:
    points = []
    for distance in sorted({d for run in runs for d in run.by_distance}, key=int):
        values = [run.by_distance[distance].accuracy for run in runs if distance in run.by_distance]
        known = [value for value in values if value is not None]
        points.append(Point(int(distance), statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0))
    return points


def _by_model(results: Results) -> dict[tuple[str, int], list[ProbeResult]]:
    """The results of all seeds, by name and depth."""
    models: dict[tuple[str, int], list[ProbeResult]] = {}
    for cell, result in results:
        models.setdefault((cell.name, cell.layers), []).append(result)
    return models


def _share(runs: Sequence[ProbeResult], count: Callable[[ProbeResult], float]) -> str:
    return f"{_mean(count(run) / (run.direct.count + run.field.count + run.beyond.count) for run in runs):.3f}"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{_mean(known):.3f}" + (f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else "")


def _notes(settings: Settings) -> str:
    size, training = settings.size, settings.training
    task = f"mqar, {size.pairs} pairs" if settings.task == "mqar" else settings.task
    notes = [
        f"{task}, {size.length} tokens, {size.symbols} symbols; hidden {training.hidden}, {training.heads} heads, rate "
        f"{training.learning_rate:g}, batches of {training.batch} rows, at most {training.steps} steps: training stops "
        f"once more than {training.enough:g} of the answers to the test rows are right.",
        f"Mean over {settings.routing_steps} routing steps of {settings.rows} test rows; fixed step: at the first of "
        f"them. "
        + (f"±: standard deviation over {settings.seeds} seeds." if settings.seeds > 1 else "One seed.")
        + " A seed gives weights, examples and routing.",
        "w_eff, w_scored: keys that a layer reads for a query, both paths together, over all queries and over those "
        "that are asked.",
        "direct: share of answers whose token sees its cue in one layer, and is seen by the query in a later one; "
        "field: those without, but with both tokens in the query's receptive field; beyond: the rest, which recall can "
        "only guess, and copying from the letters it sees and their places.",
        "right: accuracy on the group to its left.",
    ]
    return "\n".join(f"- {note}" for note in notes) + "\n"
