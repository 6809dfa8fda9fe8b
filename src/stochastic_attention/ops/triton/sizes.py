"""Sizes of tiles, warps and stages: a fixed table, so that no run tunes, recompiles or sums in another order."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kernel = Literal["forward", "of_queries", "of_keys"]


class Sizes(NamedTuple):
    """`block_m` queries, `block_n` keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By the wider head dimension, padded. The largest tiles that `compiled` finds to be free of spills, or nearly. What is
# not of the architectures with 227 KiB of shared memory a program must do with 99 KiB.
_Table = dict[Kernel, dict[int, Sizes]]
_HALF_LARGE: _Table = {
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(64, 64, 8, 2)},
    "of_queries": {64: Sizes(64, 64, 4, 2), 128: Sizes(64, 64, 4, 2), 256: Sizes(32, 32, 8, 1)},
    "of_keys": {64: Sizes(32, 128, 8, 2), 128: Sizes(32, 64, 8, 2), 256: Sizes(32, 32, 8, 1)},
}
_HALF: _Table = {
    "forward": {64: Sizes(128, 64, 4, 2), 128: Sizes(128, 64, 8, 2), 256: Sizes(64, 32, 8, 2)},
    "of_queries": {64: Sizes(128, 32, 4, 2), 128: Sizes(64, 64, 8, 2), 256: Sizes(32, 32, 8, 1)},
    "of_keys": {64: Sizes(32, 64, 4, 1), 128: Sizes(32, 64, 8, 2), 256: Sizes(32, 32, 8, 1)},
}
_SINGLE: _Table = {
    "forward": {64: Sizes(32, 32, 4, 2), 128: Sizes(32, 32, 8, 1), 256: Sizes(16, 32, 8, 1)},
    "of_queries": {64: Sizes(32, 32, 8, 1), 128: Sizes(16, 32, 8, 1), 256: Sizes(16, 16, 8, 1)},
    "of_keys": {64: Sizes(32, 32, 8, 1), 128: Sizes(16, 32, 8, 1), 256: Sizes(16, 16, 8, 1)},
}


def padded(dim: int) -> int:
    """The power of two that a head dimension is padded to; 16 at least, which products need."""
    return max(16, 1 << (dim - 1).bit_length())


def choose(kernel: Kernel, dim: int, dim_v: int, itemsize: int, capability: tuple[int, int]) -> Sizes:
    """The sizes for head dimensions `dim` and `dim_v`; `itemsize` is the largest of q, k and v."""
    half = _HALF_LARGE if capability[0] in (9, 10) else _HALF
    return (half if itemsize == 2 else _SINGLE)[kernel][max(64, padded(dim), padded(dim_v))]
