"""Fixtures of the op's tests: the backends, and memory that shows when it is read before it is written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from stochastic_attention import backend_names

# On the CPU the kernels for GPUs run in an interpreter, which takes seconds for what others do in milliseconds.
INTERPRETED = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not find_spec("triton") or torch.cuda.is_available(), reason="needs Triton's interpreter"),
]
BACKENDS = [pytest.param(name, marks=INTERPRETED if name == "triton" else ()) for name in backend_names()]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """Every backend in turn."""
    return request.param


@pytest.fixture(params=[backend for backend in BACKENDS if backend.values != ("reference",)])
def fast_backend(request) -> str:
    """Every backend in turn that the oracle judges."""
    return request.param


@pytest.fixture(autouse=True)
def poisoned_empty_memory():
    """torch.empty and its kin hold NaN (floats) and the largest value (integers) until they are written."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
