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
