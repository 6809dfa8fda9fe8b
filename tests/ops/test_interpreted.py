"""Runs the tests of Triton kernels under its interpreter, which a process must choose before it imports triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_under_the_interpreter(file, request):
    markers = request.config.getoption("-m") or ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", markers, str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=request.config.rootpath,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
