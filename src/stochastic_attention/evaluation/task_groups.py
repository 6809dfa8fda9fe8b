"""Tasks that stand for many, as mmlu for its 57 subjects: their members, how they share a limit, and their mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..records import Estimate

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
