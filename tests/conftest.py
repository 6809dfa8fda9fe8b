"""What every test stands on: one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """One thread for each test process: results and run times then do not depend on the machine's core count."""
    torch.set_num_threads(1)
