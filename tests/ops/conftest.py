"""Fixtures of the op's tests: the backends, and memory that shows when it is read before it is written."""

from __future__ import annotations

import pytest
import torch

from stochastic_attention import backend_names


@pytest.fixture(params=backend_names())
def backend(request) -> str:
    """Every backend in turn."""
    return request.param


@pytest.fixture(params=[name for name in backend_names() if name != "reference"])
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
