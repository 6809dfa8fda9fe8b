"""The commands of `sattn`, a module each. At import they need the standard library alone."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError now for a module that a command would only miss after long work."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def make_folder(output: Path) -> None:
    """Make the folder that a command writes into. ValueError now where it cannot, rather than after long work."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output must be a folder to write into, got {output}: {error.strerror}") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ValueError(f"output must be a folder to write into, got {output}, which may not be written to")


def make_way(name: str, path: Path) -> None:
    """Make the folder of a file that a command writes. ValueError now where the file cannot be."""
    if path.exists() and not path.is_file():  # a folder, or a device, which would be replaced by a file
        raise ValueError(f"{name} must be a file to write, got {path}, which is no file")
    make_folder(path.parent)


def interrupted(args: argparse.Namespace) -> int:
    """Say how to go on with a command that Ctrl-C stopped and that keeps what is finished; its exit code."""
    print(f"Interrupted. What is finished is kept in {args.output}; to resume: {args.command_line}", file=sys.stderr)
    return 130
