"""Permutations kept from one decoding step to the next: drawing one costs a sort, looking it up costs nothing.

A table is a pure function of its arguments, so keeping it is not state. In compiled code a table is a constant of the
graph, under guards on the same arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import index
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from .routing import head_words, inverse_permutation, permutation_ranks
from .validation import can_read

# A model's layers take turns, and with less room than all of them need every look-up would be a sort. A table takes
# 16 bytes a cached position at most, where the keys and values themselves take hundreds in every layer.
_MOST_BYTES = 256 * 2**20


class _Key(NamedTuple):
    """What a table depends on, but for the number of its levels."""

    smallest: int
    seed: int
    step: int
    layer: int
    heads: int
    device: torch.device


def rank_table(
    smallest: int, levels: int, *, seed: int, step: int | Tensor, layer: int, heads: int, device: torch.device
) -> Tensor:
    """Ranks and their inverse for permutations of n = smallest * 2**m positions, m = 0 ... levels - 1.

    Returns:
        int32 [2, heads, at least smallest * (2**levels - 1)]: first the rank of each position, then the position at
        each rank. Level m starts at smallest * (2**m - 1). Not to be written to.
    """
    if isinstance(step, Tensor):
        if not can_read(step.device):
            return _draw(smallest, levels, seed=seed, step=step, layer=layer, heads=heads, device=device)
        step = int(step)
    # A compiler may hold changing integers as symbols, and a constant needs numbers: `index` guards on them.
    smallest, levels, seed, step, layer, heads = (index(x) for x in (smallest, levels, seed, step, layer, heads))
    return _kept(smallest, levels, seed, step, layer, heads, device)


def _draw(
    smallest: int, levels: int, *, seed: int, step: int | Tensor, layer: int, heads: int, device: torch.device
) -> Tensor:
    head = head_words(heads, device)
    ranks = [
        permutation_ranks(n, seed=seed, step=step, layer=layer, head=head, device=device).view(heads, n)
        for n in (smallest << level for level in range(levels))
    ]
    inverse = [inverse_permutation(level) for level in ranks]
    return torch.stack([torch.cat(ranks, dim=-1), torch.cat(inverse, dim=-1)]).to(torch.int32)


class _Kept:
    """The tables used last, up to a number of bytes in all; one with more levels serves those who need fewer."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tables: OrderedDict[_Key, tuple[int, Tensor]] = OrderedDict()
        self._lock = Lock()

    def table(self, key: _Key, levels: int) -> Tensor:
        with self._lock:
            held, table = self._tables.get(key, (0, None))
            if table is not None and held >= levels:
                self._tables.move_to_end(key)
                return table
        with torch.inference_mode(False), torch.no_grad():  # or a later call could not differentiate through it
            table = _draw(key.smallest, levels, **{f: getattr(key, f) for f in _Key._fields[1:]})
        if type(table) is Tensor:  # a fake one, of somebody's tracing, must not outlive it
            with self._lock:
                self._tables[key] = levels, table
                self._tables.move_to_end(key)
                while sum(t.nbytes for _, t in self._tables.values()) > self._most_bytes:
                    self._tables.popitem(last=False)
        return table


_KEPT = _Kept(_MOST_BYTES)


@torch.compiler.assume_constant_result
def _kept(smallest: int, levels: int, seed: int, step: int, layer: int, heads: int, device: torch.device) -> Tensor:
    return _KEPT.table(_Key(smallest, seed, step, layer, heads, device), levels)
