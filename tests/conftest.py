"""What every test stands on: one thread, and the real data where it is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """One thread for each test process: results and run times then do not depend on the machine's core count."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts and evaluation sets: $SATTN_SHARED_DATA, or shared/data beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SATTN_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set SATTN_SHARED_DATA")
    return folder
