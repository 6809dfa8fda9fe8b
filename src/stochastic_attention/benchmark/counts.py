"""What a call costs, counted and not timed: pairs, products, bytes, operations. The same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ops.call import Call
from ..ops.gather import columns, neighbours
from ..ops.keys_per_query import keys_per_query
from ..ops.layout import make_layout
from ..ops.pattern import Pattern
from ..ops.plan import lower
from ..ops.triton.schedule import schedule
from ..ops.triton.sizes import Kernel, choose
from ..ops.triton.work import count_work
from .sweep import Case
from .workloads import patterns_of

# Products of two matrices over the tiles of each kernel: scores and output; then scores, their gradient and dq; then
# scores, their gradient, dk and dv.
_PRODUCTS: dict[Kernel, int] = {"forward": 2, "of_queries": 3, "of_keys": 4}
# Tensors with a row a query, and with a row a key, that each kernel reads or writes.
_TENSORS: dict[Kernel, tuple[int, int]] = {"forward": (2, 2), "of_queries": (3, 2), "of_keys": (2, 4)}
_ITEM = 2  # bytes, of half precision
_CAPABILITY = (9, 0)  # of the card that is predicted


@dataclass(frozen=True)
class Counts:
    """Of one method and case.

    Attributes:
        pairs_needed: pairs of query and key that the pattern allows.
        pairs_computed: pairs in the tiles of the forward kernel; as many as needed for a step of decoding.
        flops: floating-point operations of all kernels, tiles counted whole.
        bytes_of_memory: q, k, v, their gradients and the results, each moved once a kernel and pass that uses it.
        bytes_of_cache: rows of keys and values (queries, for the gradients of keys) that tiles read, again and again.
        kernels: launches of attention kernels.
        operations: tensor operations that plan the call, and the bytes that they write.
    """

    pairs_needed: int
    pairs_computed: int
    flops: int
    bytes_of_memory: int
    bytes_of_cache: int
    kernels: int
    operations: int
    planned_bytes: int


class _Operations(TorchDispatchMode):
    """Counts the operations that make a new tensor, and the bytes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += 1
            self.bytes += sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def count(name: str, case: Case, *, heads: int, window: int) -> Counts:
    """Counts of a method of METHODS but MoBA, whose keys depend on their values."""
    parts = [_of_pattern(pattern, case, heads) for pattern in patterns_of(name, window)]
    return Counts(*(sum(getattr(part, field) for part in parts) for field in Counts.__dataclass_fields__))


def _of_pattern(pattern: Pattern, case: Case, heads: int) -> Counts:
    return _of_step(pattern, case, heads) if case.direction == "decode" else _of_sequence(pattern, case, heads)


def _of_sequence(pattern: Pattern, case: Case, heads: int) -> Counts:
    call = _call(pattern, case.length, case.head_dim)
    copies = case.batch * heads
    kernels: list[Kernel] = ["forward"] if case.direction == "forward" else ["forward", "of_queries", "of_keys"]
    with _Operations() as planning:
        passes = lower(call)
        schedules = [schedule(call, p) for p in passes]  # kept for the backward, see `plans`
    flops = memory = cache = computed = needed = 0
    for kernel in kernels:
        sizes = choose(kernel, case.head_dim, case.head_dim, _ITEM, _CAPABILITY)
        with planning:
            for s in schedules:
                s.tiles(sizes.block_m, sizes.block_n)
        work = count_work(call, sizes.block_m, sizes.block_n)
        if kernel == "forward":
            computed, needed = work.pairs_computed, work.pairs_needed
        flops += 2 * _PRODUCTS[kernel] * case.head_dim * work.pairs_computed * copies
        streamed = sizes.block_n if kernel == "of_keys" else sizes.block_m
        cache += work.pairs_computed // streamed * 2 * case.head_dim * _ITEM * copies
        of_queries, of_keys = _TENSORS[kernel]
        rows = sum(of_queries * p.query_rows.shape[-1] + of_keys * p.key_rows.shape[-1] for p in passes)
        memory += rows * case.head_dim * _ITEM * copies
    return Counts(
        pairs_needed=needed * copies,
        pairs_computed=computed * copies,
        flops=flops,
        bytes_of_memory=memory,
        bytes_of_cache=cache,
        kernels=2 * len(kernels) * len(passes) + (case.direction == "backward"),
        operations=planning.count,
        planned_bytes=planning.bytes,
    )


def _of_step(pattern: Pattern, case: Case, heads: int) -> Counts:
    call = _call(pattern, case.length, case.head_dim, newest=True)
    copies = case.batch * heads
    by_kernel = pattern.kind == "local" or pattern.scope == "prefix"
    neighbours(call, slice(None))  # permutations are kept from step to step
    with _Operations() as planning:
        neighbours(call, slice(None))
    keys = int(keys_per_query(pattern, case.length, first=case.length - 1).sum())
    return Counts(
        pairs_needed=keys * copies,
        pairs_computed=columns(call) * copies,
        flops=4 * case.head_dim * columns(call) * copies,
        bytes_of_memory=2 * keys * case.head_dim * _ITEM * copies + columns(call) * 9 * copies,
        bytes_of_cache=0,
        kernels=3 if by_kernel else 2,
        operations=0 if by_kernel else planning.count,
        planned_bytes=0 if by_kernel else planning.bytes,
    )


def _call(pattern: Pattern, length: int, head_dim: int, *, newest: bool = False) -> Call:
    """The call of one head, with nothing in its tensors: counts do not depend on values."""
    x = torch.empty(1, 1, length, head_dim, dtype=torch.bfloat16)
    place = torch.tensor([length - 1]) if newest else None
    q = x[:, :, -1:] if newest else x
    layout = make_layout(None, place, batch=1, queries=q.shape[2], keys=length, device=x.device)
    return Call.checked(q, x, x, pattern, layout=layout, decode=newest)
