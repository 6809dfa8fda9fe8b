"""`sattn`: one command a module of `commands`, imported here, its heavy imports left to its `run`."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType

from . import __version__

# A command module has `add_arguments(parser)` and `run(args) -> int`; its docstring's first line is its help.
COMMANDS = {
    "compare": ".commands.compare",
    "recommend": ".commands.recommend",
    "generate": ".commands.generate",
    "train": ".commands.train",
    "eval": ".commands.eval",
    "perplexity": ".commands.perplexity",
    "bench": ".commands.bench",
    "check": ".commands.check",
    "predict": ".commands.predict",
    "backends": ".commands.backends",
    "reach": ".commands.reach",
    "mixing": ".commands.mixing",
    "estimator": ".commands.estimator",
    "graph": ".commands.graph",
    "compare-graphs": ".commands.compare_graphs",
    "probe": ".commands.probe",
    "report": ".commands.report",
}

# Third-party module -> the extra that brings it.
_EXTRAS = {
    "transformers": "hf",
    "accelerate": "hf",
    "gguf": "hf",
    "yaml": "hf",
    "datasets": "evaluation",
    "matplotlib": "evaluation",
    "tqdm": "evaluation",
    "lm_eval": "harness",
    "numpy": "analysis",
    "scipy": "analysis",
    "igraph": "analysis",
    "pyarrow": "analysis",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line surface."""
    parser = argparse.ArgumentParser(prog="sattn", description="Stochastic attention: measure it, compare it.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = _module(name)
        help_line = (module.__doc__ or "").partition("\n")[0]  # python -OO leaves none
        command = subparsers.add_parser(
            name,
            help=help_line,
            description=help_line,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,  # or --seed would be taken for --seeds
        )
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 2 for bad input, 1 for a full disk, 130 for Ctrl-C, told in one line.

    141, without a word, where whoever reads the output has had enough of it, as `head` has.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding that lacks ± is no reason to lose a table
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    args.command_line = shlex.join(["sattn", *argv])
    try:
        code = _module(args.command).run(args)
        print(end="", flush=True)  # here, where a closed pipe is known for one
        return code
    except KeyboardInterrupt:
        print(f"sattn {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes once more at its end, into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        print(f"sattn {args.command}: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"sattn {args.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"sattn {args.command}: needs {error.name}, which is not installed; "
            f'pip install "stochastic-attention[{extra}]" brings it',
            file=sys.stderr,
        )
    return 2


def _module(command: str) -> ModuleType:
    return import_module(COMMANDS[command], __package__)
