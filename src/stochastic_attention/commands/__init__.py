"""The commands of `sattn`, a module each. At import they need the standard library alone."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError now for a module that a command would only miss after long work."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def interrupted(args: argparse.Namespace) -> int:
    """Say how to go on with a command that Ctrl-C stopped and that keeps what is finished; its exit code."""
    print(f"Interrupted. What is finished is kept in {args.output}; to resume: {args.command_line}", file=sys.stderr)
    return 130
