"""What every test stands on: one thread, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") and not torch.cuda.is_available():
    # Kernels are made for the interpreter or for a GPU when triton is first imported; other processes are not told.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """One thread for each test process: results and run times then do not depend on the machine's core count."""
    torch.set_num_threads(1)
