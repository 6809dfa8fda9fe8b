"""Running programs that a model wrote, to see whether they pass their tests.

This is no sandbox. A program runs in a process of its own, in an empty folder and with an empty environment, ends after
a time limit and may not use more than so much memory; but it has the rights of the user, and may read and delete files
or reach the network. Whoever runs what a model wrote does so in a container that holds nothing of value.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

SECONDS = 10.0
_MEMORY = 4 * 2**30
# Only what runs to its end leaves with this status: a program that exits early, with 0 too, has not passed.
_PASSED = 86
_RUNNER = f"""
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
except (ImportError, ValueError):
    pass  # a system without such a limit
exec(compile(sys.stdin.buffer.read(), "program", "exec"), {{"__name__": "program"}})
sys.exit({_PASSED})
"""


def passes(program: str, *, seconds: float = SECONDS) -> bool:
    """Whether the Python program runs to its end, without an exception and within the time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as process,
    ):
        try:
            process.communicate(program.encode("utf-8", errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # the process, and what it has started
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode == _PASSED
