"""The compiled kernel of csrc/: built on first use by the machine's C++ compiler, kept in the cache, called by ctypes.

A build is named by its source, its flags and the instruction set that it was made for, which PyTorch reports for the
processor at hand. So machines that share a cache never run each other's instructions.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from .cache import cache_directory

_SOURCE = Path(__file__).parent / "csrc" / "attention.cpp"
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared")
# By torch.backends.cpu.get_cpu_capability(); a processor that is not listed gets the compiler's own baseline.
_INSTRUCTION_SETS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
_ENTRIES = ("forward_float", "forward_double", "backward_float", "backward_double")

_log = logging.getLogger(__name__)


class NotBuiltError(Exception):
    """The kernel cannot be had here; says why."""


@cache
def library() -> ctypes.CDLL:
    """The loaded kernel. Built first where the cache has none.

    Raises:
        NotBuiltError: there is no compiler, or it fails.
    """
    flags = _flags()
    path = _kept_at(flags)
    if not path.is_file():
        _build(path, flags)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuiltError(f"{path} cannot be loaded: {error}") from error
    for name in _ENTRIES:
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


@cache
def why_not_built() -> str | None:
    """None where the kernel can be called; else why not, which is also logged, once."""
    try:
        library()
    except NotBuiltError as error:
        _log.warning("the compiled CPU kernel is not available, slower code runs instead: %s", error)
        return str(error)
    return None


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_INSTRUCTION_SETS.get(torch.backends.cpu.get_cpu_capability(), ()))


def _kept_at(flags: tuple[str, ...]) -> Path:
    made_of = (_SOURCE.read_text(encoding="utf-8"), os.environ.get("CXX", ""), *flags)
    where = (platform.machine(), *platform.libc_ver())
    digest = hashlib.sha256("\0".join((*made_of, *where)).encode()).hexdigest()
    return cache_directory() / "kernels" / f"attention-{digest[:16]}.so"


def _build(path: Path, flags: tuple[str, ...]) -> None:
    compiler = _compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed whole: an interrupted build, or one beside another, leaves nothing half made.
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as aside:
            command = [*compiler, *flags, "-o", str(Path(aside) / path.name), str(_SOURCE)]
            _log.info("compiling the CPU kernel, once: some seconds")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotBuiltError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
            os.replace(Path(aside) / path.name, path)
    except OSError as error:
        raise NotBuiltError(f"{path} cannot be built: {error}") from error


def _compiler() -> list[str]:
    """$CXX, or the first of the usual names on the path."""
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]
    for candidate in candidates:
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise NotBuiltError(f"no C++ compiler: {' or '.join(c[0] for c in candidates if c)} is not on the path")
