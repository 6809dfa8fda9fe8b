"""Routing keys: the only randomness. A stateless hash of (seed, step, layer, head, position), and what is drawn by it.

The same 32 bits come out on every device, in eager and compiled code, in every process; no generator is read or
written. All arithmetic is int64 holding unsigned 32-bit values, arranged so that no product leaves int64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_LOW32 = 0xFFFFFFFF
# Two independent 32-bit states: positions pass through both, so two layers agree only if 64 bits collide.
STATES = 0x9E3779B9, 0x85EBCA77


def _mix(x: int | Tensor) -> int | Tensor:
    """A bijection of 32-bit words with full avalanche ("lowbias32", C. Wellons, public domain constants)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    # 0x846CA68B as a negative number: the product then stays within int64, and its low 32 bits are the same.
    x = (x * (0x846CA68B - 2**32)) & _LOW32
    return x ^ (x >> 16)


def mix_words(state: int, words: Iterable[int | Tensor]) -> int | Tensor:
    """`state` after each of the 32-bit words has gone through it."""
    key: int | Tensor = state
    for word in words:
        key = _mix(key ^ word)
    return key


def routing_keys(
    positions: Tensor, *, seed: int, step: int | Tensor = 0, layer: int = 0, head: int | Tensor = 0
) -> Tensor:
    """u = hash32(seed, step, layer, head, position), a bijection of positions for each (seed, step, layer, head).

    Args:
        positions: int64 [...], 0 <= position < 2**32.
        seed, step: up to 63 bits. `step` may be a 0-d int64 tensor, so that compiled code need not specialise on it.
        layer: up to 32 bits.
        head: an int, or an int64 tensor broadcastable against `positions`.

    Returns:
        int64, broadcast of `positions` and `head`, values in [0, 2**32).
    """
    u: int | Tensor = positions
    for state in STATES:
        u = _mix(u ^ mix_words(state, (*halves(seed), *halves(step), layer, head)))
    assert isinstance(u, torch.Tensor)
    return u


def halves(word: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """The low and the high 32 bits of a word of 63."""
    return word & _LOW32, word >> 32


def head_words(heads: int, device: torch.device) -> int | Tensor:
    """The words 0 ... heads - 1, int64 [heads, 1]; of one head a number, which costs no tensor operation to mix."""
    return torch.arange(heads, device=device)[:, None] if heads > 1 else 0


def permutation_ranks(
    n: int,
    *,
    seed: int,
    step: int | Tensor = 0,
    layer: int = 0,
    head: int | Tensor = 0,
    device: torch.device | None = None,
) -> Tensor:
    """rank of each position in [0, n): its place in the order of (routing key, position). int64 [..., n]."""
    keys = routing_keys(torch.arange(n, device=device), seed=seed, step=step, layer=layer, head=head)
    return inverse_permutation(keys.argsort(dim=-1, stable=True))


def draw_distinct(below: Tensor, draws: int, *, seed: int, step: int | Tensor = 0, layer: int = 0) -> Tensor:
    """`draws` different numbers in [0, b) for each b of `below`, all subsets alike; all b numbers where b <= draws.

    Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987) takes no more than the hash of (b, number of the draw) and
    no table of candidates: draw d is uniform in [0, t], t = b - draws + d, and where it is taken already, t is free.

    Args:
        below: int64 [...], 0 <= b < 2**31.
        draws: how many. The hash counts them in place of heads.
        seed, step, layer: as in `routing_keys`.

    Returns:
        int64 [..., draws], in no order, -1 in the places that b < draws leaves empty.
    """
    draw = torch.arange(draws, device=below.device)
    keys = routing_keys(below[..., None], seed=seed, step=step, layer=layer, head=draw)
    last = below[..., None] - draws + draw
    drawn = torch.where(last < 0, -1, keys * (last + 1) >> 32)
    for d in range(1, draws):
        taken = (drawn[..., :d] == drawn[..., d : d + 1]).any(-1)
        drawn[..., d] = torch.where(taken, last[..., d], drawn[..., d])
    return drawn.clamp(min=-1)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order` along the last dimension. int64, same shape."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
