"""Extra memory of the linear backend: no object grows with the square of the length, not even one of bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stochastic_attention import Pattern, attention

from .cases import tensors


class LargestResult(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [
            x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ]
        self.elements = max([self.elements, *storages])
        return result


def largest_result(n: int, pattern: Pattern, backend: str, documents: torch.Tensor | None) -> int:
    inputs = tensors(n, batch=1, heads=(2, 1), dims=(4, 4), dtype=torch.float32, grad=True)
    with LargestResult() as largest:
        attention(*inputs, pattern, documents=documents, backend=backend).sum().backward()
    return largest.elements


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        Pattern.local(8, sinks=2),
        Pattern.stochastic(8),
        Pattern.stochastic(8, shape="block"),
        Pattern.stochastic(8, scope="prefix", local=4, sinks=2, correction=0.5),
        Pattern.stochastic(8, scope="prefix", shape="block", per_head=True),
    ],
    ids=str,
)
def test_the_largest_tensor_grows_with_the_length(pattern, packed):
    sizes = {
        n: largest_result(n, pattern, "blocked", torch.arange(n)[None] * 3 // n if packed else None)
        for n in (2048, 4096)
    }
    assert sizes[4096] <= 2.2 * sizes[2048]
    assert sizes[4096] <= 4096 * 128


def test_the_measure_sees_a_square():
    assert largest_result(256, Pattern.local(8), "reference", None) >= 256 * 256
