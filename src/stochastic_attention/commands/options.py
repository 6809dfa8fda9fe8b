"""Reading options that hold several values."""

from __future__ import annotations


def split_list(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_numbers(name: str, text: str) -> tuple[int, ...]:
    """The integers of a comma-separated list; ValueError that names the option otherwise."""
    try:
        return tuple(int(part) for part in split_list(text))
    except ValueError:
        raise ValueError(f"{name} must be integers separated by commas, got {text!r}") from None


def split_limits(text: str, tasks: tuple[str, ...]) -> tuple[int | None, ...]:
    """Rows of each task from "N", "TASK=N", or both; None for a task without. ValueError for one not in `tasks`."""
    limits: dict[str, int] = {}
    for part in split_list(text):
        task, _, number = part.rpartition("=")
        if not number.isdecimal() or (task and task not in tasks):
            raise ValueError(
                f"limit must be N or TASK=N of the tasks {', '.join(tasks)}, separated by commas, got {part!r}"
            )
        limits[task] = int(number)
    return tuple(limits.get(task, limits.get("")) for task in tasks)


def count_or_auto(text: str) -> int | None:
    """A number, None for "auto"."""
    return None if text == "auto" else int(text)
