"""Tables made again from a record's data, by the renderer of the command that wrote it."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..tables import markdown
from .markdown import fenced

Facts = Mapping[str, Any]


def rebuild(hint: Any, plain: Any) -> Any:  # noqa: ANN401  # any type, and data of it
    """What `dataclasses.asdict` and JSON made plain, as `hint` says; the opposite of both.

    Raises:
        TypeError, KeyError: the data are not of that type.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        needed = {field.name for field in fields(hint) if field.default is field.default_factory is MISSING}
        other = (needed - set(plain)) | (set(plain) - set(hints))
        if other:
            raise TypeError(f"{getattr(hint, '__name__', hint)} with other fields: {', '.join(sorted(other))}")
        return hint(**{name: rebuild(hints[name], value) for name, value in plain.items()})  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        some = [one for one in inner if one is not type(None)]
        return None if plain is None else rebuild(some[0], plain)
    if origin in (list, tuple, Sequence) and not isinstance(plain, str):
        return (tuple if origin is tuple else list)(rebuild(inner[0], value) for value in plain)
    if isinstance(plain, dict) and len(inner) == 2:
        return {(int(key) if inner[0] is int else key): rebuild(inner[1], value) for key, value in plain.items()}
    return plain


def _compare(config: Facts, results: Facts) -> str:
    from ..evaluation.results import CellResult, PrefillResult
    from ..evaluation.table import render

    cells, prefill = rebuild(list[CellResult], results["cells"]), rebuild(list[PrefillResult], results["prefill"])
    return render(cells, prefill, match=config["match"], length=config["length"])


def _recommend(config: Facts, results: Facts) -> str:
    return f"{_compare(config, results)}\n{results['verdict']}\n"


def _eval(config: Facts, results: Facts) -> str:
    from ..evaluation.harness.evaluate import Result
    from ..evaluation.harness.table import render
    from ..evaluation.paired import Difference

    cells, differences = rebuild(list[Result], results["cells"]), rebuild(list[Difference], results["differences"])
    return render(cells, differences, match=config["match"])


def _perplexity(config: Facts, results: Facts) -> str:
    from ..evaluation.loss_comparison import Named, Outcome, render
    from ..evaluation.token_losses import Bucket

    models = [
        (Named(model["kind"], model["model"]), rebuild(list[Bucket], model["buckets"])) for model in results["models"]
    ]
    return render(Outcome(dict(config), models))


def _generate(config: Facts, results: Facts) -> str:  # noqa: ARG001
    """The figures, which the command prints for a terminal, then each text."""
    from ..evaluation.generation import Continuation, render

    continuations = rebuild(list[Continuation], results["continuations"])
    texts = [f"{found.method}:\n\n{fenced(found.text)}" for found in continuations]
    return "\n\n".join([fenced(render(continuations)), *texts])


def _probe(config: Facts, results: Facts) -> str:
    from ..lm.probes.cells import Settings, plan
    from ..lm.probes.report import render
    from ..lm.probes.training import ProbeResult

    # Settings refuse a device that this machine lacks, which a table does not need.
    settings = rebuild(Settings, {**config, "device": "cpu"})
    return render([(cell, rebuild(ProbeResult, results[cell.key])) for cell in plan(settings)], settings)


def _predict(config: Facts, results: Facts) -> str:  # noqa: ARG001
    from ..benchmark.prediction import Assumptions, Prediction, table

    return table(rebuild(list[Prediction], results["predictions"]), rebuild(Assumptions, results["assumptions"]))


def _reach(config: Facts, results: Facts) -> str:
    from ..analysis.reach_report import PatternReach, Settings, render

    return render(rebuild(list[PatternReach], results["patterns"]), rebuild(Settings, config))


def _mixing(config: Facts, results: Facts) -> str:
    from ..analysis.mixing_report import PatternMixing, Settings, render

    return render(rebuild(list[PatternMixing], results["patterns"]), rebuild(Settings, config))


def _estimator(config: Facts, results: Facts) -> str:
    from ..analysis.estimator_report import Series, Settings, render

    return render(rebuild(list[Series], results["series"]), rebuild(Settings, config))


def _graph(config: Facts, results: Facts) -> str:  # noqa: ARG001
    from ..analysis.graph_report import GraphReport, render

    return render(rebuild(GraphReport, {name: value for name, value in results.items() if name != "seconds"}))


def _compare_graphs(config: Facts, results: Facts) -> str:  # noqa: ARG001
    from ..analysis.graph_comparison import render
    from ..analysis.graph_report import GraphReport

    return render(rebuild(dict[str, GraphReport], results))


_OF_ALL_CASES = ("device", "dtype", "heads", "head_dim", "window", "draw", "repeats")


def _bench(config: Facts, results: Facts) -> str:
    """A line a measurement, with time and memory; batch and head dimension where the record has them."""
    directions = {False: "forward", True: "forward + backward"}
    speed = {(directions[row["backward"]], *_case(row)): row for row in results["speed"]}
    speed |= {("decode", *_case(row)): row for row in results["decode"]}
    memory = {(directions[row["backward"]], *_case(row)): row for row in results["memory"]}
    if len(speed) + len(memory) < sum(len(results[part]) for part in PARTS["bench"]):
        raise ValueError("a case was measured twice")
    if not speed and not memory:
        return "No case was finished.\n"
    rows = []
    for key in [*speed, *(key for key in memory if key not in speed)]:
        time, extra = speed.get(key), memory.get(key)
        row: Facts = time or extra or {}
        line = {"pattern": row["pattern"], "tokens": f"{row['length']:,}", "passes": key[0]}
        line |= {name.replace("_", " "): str(row[name]) for name in ("batch", "head_dim") if name in row}
        line["ms"] = f"{time['seconds'] * 1e3:,.2f}" if time else ""
        line["full, ms"] = f"{time['full_seconds'] * 1e3:,.2f}" if time else ""
        line["full / it"] = f"{time['speedup']:.2f}x" if time else ""
        line["limit"] = f"{time['limit']:.1f}x" if time else ""
        if memory:
            line["MiB above the inputs"] = f"{extra['extra_bytes'] / 2**20:.1f}" if extra else ""
        rows.append(line)
    notes = [
        "full: torch's own full causal attention in the same run; limit: how many times fewer pairs of query and key."
    ]
    of_all = [f"{name.replace('_', ' ')} {config[name]}" for name in _OF_ALL_CASES if name in config]
    notes += [f"{', '.join(of_all)}."] if of_all else []
    table = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
    return table + "\n" + "".join(f"- {note}\n" for note in notes)


def _case(row: Facts) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("pattern", "length", "head_dim", "batch"))


RENDERERS: dict[str, Callable[[Facts, Facts], str]] = {
    "compare": _compare,
    "recommend": _recommend,
    "eval": _eval,
    "perplexity": _perplexity,
    "generate": _generate,
    "probe": _probe,
    "predict": _predict,
    "reach": _reach,
    "mixing": _mixing,
    "estimator": _estimator,
    "graph": _graph,
    "compare-graphs": _compare_graphs,
    "bench": _bench,
}
# Where a renderer does not show all results, those that it shows.
PARTS = {
    "bench": ("speed", "decode", "memory"),
    "generate": ("continuations",),
    "predict": ("predictions",),
    "recommend": ("cells", "prefill", "verdict"),
}
