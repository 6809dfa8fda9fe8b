"""Sizes of tiles, warps and stages: a fixed table, so that no run tunes, recompiles or sums in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["forward", "of_queries", "of_keys"]


@dataclass(frozen=True)
class Sizes:
    """`block_m` queries, `block_n` keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By the wider of the two head dimensions, rounded up to a power of two. What compiles without spills for compute
# capabilities 8.0 and 9.0: see `compiled`.
_HALF: dict[Kernel, dict[int, Sizes]] = {
    "forward": {64: Sizes(128, 64, 4, 3), 128: Sizes(128, 64, 8, 3), 256: Sizes(64, 32, 4, 2)},
    "of_queries": {64: Sizes(128, 64, 8, 2), 128: Sizes(64, 64, 4, 2), 256: Sizes(64, 32, 8, 1)},
    "of_keys": {64: Sizes(64, 128, 8, 2), 128: Sizes(32, 128, 8, 2), 256: Sizes(32, 64, 8, 1)},
}
_SINGLE: dict[Kernel, dict[int, Sizes]] = {
    "forward": {64: Sizes(64, 32, 4, 2), 128: Sizes(64, 32, 8, 2), 256: Sizes(32, 32, 8, 1)},
    "of_queries": {64: Sizes(64, 32, 4, 2), 128: Sizes(32, 32, 4, 1), 256: Sizes(32, 16, 8, 1)},
    "of_keys": {64: Sizes(32, 64, 4, 2), 128: Sizes(32, 32, 4, 1), 256: Sizes(16, 32, 8, 1)},
}


def padded(dim: int) -> int:
    """The power of two that a head dimension is padded to; 16 at least, which products need."""
    return max(16, 1 << (dim - 1).bit_length())


def choose(kernel: Kernel, dim: int, dim_v: int, bytes_of_item: int) -> Sizes:
    """The sizes for head dimensions `dim` and `dim_v`, of items of 2 or 4 bytes (8: the interpreter alone)."""
    table = (_HALF if bytes_of_item == 2 else _SINGLE)[kernel]
    return table[max(64, padded(dim), padded(dim_v))]
