"""Argument checks that name the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch


def can_read(device: torch.device) -> bool:
    """Whether values of tensors on `device` may be read: another device would stall, a compiled graph would break."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def plain_number(value: Any) -> Any:  # noqa: ANN401  # of any type
    """A number of another library's, such as numpy's, as Python's own; anything else as it is."""
    if type(value) in (bool, int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def check_count(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """Raise ValueError unless `value` is an int (bools and floats are not) within [minimum, maximum]."""
    bounds = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")


def check_real(name: str, value: object, *, minimum: float | None = None, above: float | None = None) -> None:
    """Raise ValueError unless `value` is a finite number, >= `minimum` and > `above` where given."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (minimum is not None and value < minimum) or (above is not None and value <= above):  # type: ignore[operator]
        bounds = f" >= {minimum}" if minimum is not None else f" > {above}" if above is not None else ""
        raise ValueError(f"{name} must be a finite number{bounds}, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_distinct(name: str, values: Sequence[object]) -> None:
    """Raise ValueError unless there is at least one value, and none stands twice."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be distinct and at least one, got {', '.join(map(str, values)) or 'none'}")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_device(device: str) -> None:
    """Raise ValueError unless torch can put tensors on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one that torch has here, got {device!r}: {str(error).splitlines()[0]}"
        ) from None
