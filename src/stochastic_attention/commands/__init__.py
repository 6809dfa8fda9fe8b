"""The commands of `sattn`, a module each. At import they need the standard library alone."""

from __future__ import annotations

from importlib.util import find_spec


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError now for a module that a command would only miss after long work."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
