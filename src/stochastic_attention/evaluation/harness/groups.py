"""Tasks that stand for many, as mmlu for its 57 subjects: their members, how they share a limit, and their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...records import Estimate

if TYPE_CHECKING:
    from .evaluate import Result

MMLU_SUBJECTS = (
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
)
GROUPS = {"mmlu": tuple(f"mmlu_{subject}" for subject in MMLU_SUBJECTS)}


def expand(names: Sequence[str]) -> Iterator[str]:
    """The names, each group replaced by its members."""
    for name in names:
        yield from GROUPS.get(name, (name,))


def share_limit(name: str, limit: int | None, size: Callable[[str], int]) -> Mapping[str, int | None]:
    """Rows to take of each task that `name` stands for, itself for most; None for all. `size`: the rows a task has."""
    members = list(expand([name]))
    if name not in GROUPS or limit is None:
        return dict.fromkeys(members, limit)
    return split_limit(limit, {member: size(member) for member in members})


def split_limit(limit: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Rows to take of each member of a group so that they are `limit` in all, or every row where there are fewer.

    Shares are as even as the members' sizes allow; what does not divide goes to the largest, one row each. Members
    without a share are left out.
    """
    shares = {}
    for place, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(sizes[name], limit // (len(sizes) - place))
        limit -= shares[name]
    return {name: shares[name] for name in sizes if shares[name]}


def pooled(parts: Sequence[Estimate]) -> Estimate:
    """The mean over the rows of all parts, each part a mean over its own, as if all had been one sample."""
    rows = sum(part.n for part in parts)
    mean = math.fsum(part.n * part.value for part in parts) / rows
    squares = 0.0
    for part in parts:
        if part.n > 1 and part.stderr is None:
            return Estimate(mean, None, rows)
        within = part.n * (part.n - 1) * (part.stderr or 0.0) ** 2
        squares += within + part.n * (part.value - mean) ** 2
    return Estimate(mean, math.sqrt(squares / (rows - 1) / rows) if rows > 1 else None, rows)


def pool_results(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """The results of each name, those of a group's members made one for each method, budget and draw."""
    shown = []
    for name in names:
        members = set(expand([name]))
        mine = [result for result in results if result.task in members]
        cells = [(result.method, result.budget, result.seed) for result in mine]
        for cell in dict.fromkeys(cells):
            parts = [result for result, other in zip(mine, cells, strict=True) if other == cell]
            shown.append(_pool(name, parts) if name in GROUPS else parts[0])
    return shown


def _pool(name: str, parts: Sequence[Result]) -> Result:
    """One result of a group, from those of its members: means over rows."""
    rows = {metric: [row for part in parts for row in part.rows[metric]] for metric in parts[0].rows}
    sizes = [next(iter(part.metrics.values())).n for part in parts]
    patterns = list(dict.fromkeys(part.pattern for part in parts))
    return replace(
        parts[0],
        task=name,
        pattern=patterns[0] if len(patterns) == 1 else f"{len(patterns)} patterns",
        w_eff=_weighted([part.w_eff for part in parts], sizes),
        w_scored=_weighted([part.w_scored for part in parts], sizes),
        metrics={metric: pooled([part.metrics[metric] for part in parts]) for metric in rows},
        seconds=sum(part.seconds for part in parts),
        rows=rows,
    )


def _weighted(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(known) / sum(weights) if known else None
