"""Backward passes that are differentiated no further, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backend: str) -> Callable[[Backward], Backward]:
    """Make the backward of an autograd function refuse a second derivative: RuntimeError when it is asked for.

    PyTorch's own `once_differentiable` joins its refusal to nothing that the gradients depend on, so `autograd.grad`
    may pass it by, and leaves their part out of the result without a word.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - autograd's context
            with torch.no_grad():
                gradients = backward(ctx, *d_results)
            if not torch.is_grad_enabled():
                return gradients
            return _Refusal.apply(backend, len(gradients), *gradients, *ctx.saved_tensors, *d_results)

        return run

    return decorate


class _Refusal(torch.autograd.Function):
    """The identity on the first `count` of `tensors`, which are said to depend on all of them."""

    @staticmethod
    def forward(ctx: Any, backend: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        ctx.backend = backend
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(f'backend "{ctx.backend}" has no second derivative; backend="reference" has')
