"""The tasks by name. Adding one is one file with its class, or one more format of a kind that is here, and a line."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Task, TaskOptions
from .distance import Distance
from .lambada import Lambada
from .multiple_choice import FORMATS, MultipleChoice
from .retrieval import AssociativeRecall, MultiNeedle, Needle, Passkey, VariableTracking
from .text import Perplexity, Recall

__all__ = ["TASKS", "Task", "TaskOptions", "check_tasks"]

TASKS: dict[str, Task] = {
    "perplexity": Perplexity(),
    "recall": Recall(),
    "distance": Distance(),
    "needle": Needle(),
    "multi-needle": MultiNeedle(),
    "passkey": Passkey(),
    "variable-tracking": VariableTracking(),
    "associative-recall": AssociativeRecall(),
    "lambada": Lambada(),
    **{name: MultipleChoice(form) for name, form in FORMATS.items()},
}


def check_tasks(names: Iterable[str], options: TaskOptions) -> None:
    """Raise one ValueError that names every unknown task, or else everything that the tasks miss."""
    names = list(names)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {', '.join(unknown)}")
    missing = [f"{name}: {reason}" for name in names if (reason := TASKS[name].missing(options)) is not None]
    if missing:
        raise ValueError("; ".join(missing))
