"""The compiled kernels of csrc/: built on first use by the machine's C++ compiler, kept in the cache, called by ctypes.

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
from torch import Tensor

from .cache import cache_directory

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared")
# By torch.backends.cpu.get_cpu_capability(); a processor that is not listed gets the compiler's own baseline.
_INSTRUCTION_SETS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
_FAILURES = {1: "arguments laid out differently", 2: "sizes", 3: "a row or slot out of range", 4: "memory"}

_log = logging.getLogger(__name__)


class NotBuiltError(Exception):
    """The kernels cannot be had here; says why."""


class Operand(ctypes.Structure):
    """A tensor [B, H, N, D] with dense rows, of the compute dtype or bfloat16; mirrors `Operand` in csrc/vectors.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("b", "h", "n", "is_bfloat16"))]

    @classmethod
    def of(cls, x: Tensor) -> Operand:
        """`x` as the kernels read it; `x` must outlive the call."""
        return cls(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)


def sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """What every kernel is told of q [B, Hq, Nq, D], k [B, Hkv, Nk, D] and v [B, Hkv, Nk, Dv], by argument."""
    return {
        "batch": k.shape[0],
        "kv_heads": k.shape[1],
        "group": q.shape[1] // k.shape[1],
        "queries": q.shape[2],
        "keys": k.shape[2],
        "dim": k.shape[3],
        "dim_v": v.shape[3],
    }


def can_read_as_is(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels that compute in `dtype` read `x` where it lies."""
    known = x.dtype == dtype or (dtype == torch.float32 and x.dtype == torch.bfloat16)
    return known and (x.stride(-1) == 1 or x.shape[-1] == 1)


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself, or a copy that kernels that compute in `dtype` can read."""
    return x if can_read_as_is(x, dtype) else x.to(dtype).contiguous()


def call(name: str, dtype: torch.dtype, arguments: ctypes.Structure) -> None:
    """Run a kernel; RuntimeError where it finds its arguments impossible."""
    entry = getattr(library(), f"{name}_{'double' if dtype == torch.float64 else 'float'}")
    entry.restype = ctypes.c_int64
    failed = entry(ctypes.byref(arguments))
    if failed:
        raise RuntimeError(f"the compiled kernel {name} refused its call: {_FAILURES[failed]}")


@cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Built first where the cache has none.

    Raises:
        NotBuiltError: there is no compiler, or it fails.
    """
    flags = _flags()
    try:
        path = _kept_at(flags)
        built = path.is_file()
    except (OSError, RuntimeError) as error:  # no home directory, or one that may not be read
        raise NotBuiltError(f"no cache directory: {error}") from error
    if not built:
        _build(path, flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuiltError(f"{path} cannot be loaded: {error}") from error


@cache
def why_not_built() -> str | None:
    """None where the kernels can be called; else why not, which is also logged, once."""
    try:
        library()
    except NotBuiltError as error:
        _log.warning("the compiled CPU kernels are not available, slower code runs instead: %s", error)
        return str(error)
    return None


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_INSTRUCTION_SETS.get(torch.backends.cpu.get_cpu_capability(), ()))


def _kept_at(flags: tuple[str, ...]) -> Path:
    made_of = (*(file.read_text(encoding="utf-8") for file in _files()), os.environ.get("CXX", ""), *flags)
    where = (platform.machine(), *platform.libc_ver())
    digest = hashlib.sha256("\0".join((*made_of, *where)).encode()).hexdigest()
    return cache_directory() / "kernels" / f"cpu-{digest[:16]}.so"


def _files() -> list[Path]:
    return sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])


def _build(path: Path, flags: tuple[str, ...]) -> None:
    compiler = _compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed whole: an interrupted build, or one beside another, leaves nothing half made.
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as aside:
            sources = [str(file) for file in _files() if file.suffix == ".cpp"]
            command = [*compiler, *flags, "-o", str(Path(aside) / path.name), *sources]
            _log.info("compiling the CPU kernels, once: some seconds")
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
