"""Where tokens stand: documents, positions inside them, and which key each query is.

Shapes: B batch rows; B' = B, or 1 where every row is laid out alike; Nk keys, Nq queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .routing import inverse_permutation
from .validation import can_read, check_count

PADDING = -1
_NO_DOCUMENT = torch.iinfo(torch.int64).max  # sorts behind every document


@dataclass(frozen=True)
class Layout:
    """Integer facts about the key axis, and the place of each query on it.

    Attributes:
        documents: int64 [B', Nk], as the caller gave them; None where all keys are one document without padding.
        query_token: int64 [B', Nq], the key index of each query.
        keys: Nk.
        queries_are_keys: query i is key i, for all keys.
    """

    documents: Tensor | None
    query_token: Tensor
    keys: int
    queries_are_keys: bool

    @property
    def is_single(self) -> bool:
        """One document, no padding, a query at every key: all that follows is known without reading a tensor."""
        return self.documents is None and self.queries_are_keys

    @property
    def first(self) -> Tensor:
        """int64 [B', Nk], where the token's document starts once tokens are sorted by document and padding is put last.

        It also serves as the document's name. -1 for padding.
        """
        return self._facts[0]

    @property
    def position(self) -> Tensor:
        """int64 [B', Nk], position in the document, 0 for padding."""
        return self._facts[1]

    @property
    def length(self) -> Tensor:
        """int64 [B', Nk], tokens in the document, 0 for padding."""
        return self._facts[2]

    @cached_property
    def longest(self) -> int:
        """Tokens in the longest document."""
        if self.documents is None:
            return self.keys
        return int(self.length.max()) if self.length.numel() else 0

    @cached_property
    def _facts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(first, position, length); made when first asked for, because documents are sorted for them."""
        if self.documents is not None:
            return _lay_out_documents(self.documents)
        position = torch.arange(self.keys, device=self.query_token.device)[None]
        return torch.zeros_like(position), position, torch.full_like(position, self.keys)

    @cached_property
    def packed(self) -> Tensor:
        """int64 [B', Nk]: slot of each token when documents are laid end to end, padding last."""
        if self.documents is None:
            return self.position
        filled = torch.where(self.first < 0, self.first.shape[-1], self.first + self.position)
        return inverse_permutation(filled.argsort(dim=-1, stable=True))

    @cached_property
    def packed_order(self) -> Tensor:
        """int64 [B', Nk]: the token in each slot of `packed`."""
        return self.position if self.documents is None else inverse_permutation(self.packed)

    def of_queries(self, per_key: Tensor) -> Tensor:
        """Read a per-key tensor [B', ..., Nk] at each query's token: [B', ..., Nq].

        `per_key` may hold the first keys only, where all queries that are used stand among those.
        """
        if self.queries_are_keys and per_key.shape[-1] == self.keys:
            return per_key
        index = self.query_token.view(self.query_token.shape[0], *(1,) * (per_key.dim() - 2), -1)
        rows = index.shape[0] if per_key.shape[0] == 1 else per_key.shape[0]
        per_key = per_key.expand(rows, *per_key.shape[1:])
        if per_key.shape[-1] < self.first.shape[-1]:
            index = index.clamp(max=per_key.shape[-1] - 1)
        return per_key.gather(-1, index.expand(*per_key.shape[:-1], -1))


def make_layout(
    documents: Tensor | None,
    query_positions: Tensor | None,
    *,
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Layout:
    """Check `documents` [B, Nk] and `query_positions` [Nq] or [B, Nq] (see `attention`) and lay the tokens out."""
    query_token = _check_query_positions(query_positions, batch=batch, queries=queries, keys=keys, device=device)
    if documents is not None:
        documents = _check_documents(documents, batch=batch, keys=keys, device=device)
    return Layout(
        documents=documents,
        query_token=torch.arange(keys, device=device)[None] if query_token is None else query_token,
        keys=keys,
        queries_are_keys=query_token is None,
    )


def _lay_out_documents(documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`first`, `position` and `length` of `Layout`; tokens of a document need not be neighbours."""
    ids, order = torch.where(documents < 0, _NO_DOCUMENT, documents).sort(dim=-1, stable=True)
    slots = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.where(starts, slots, 0).cummax(dim=-1).values
    length = torch.zeros_like(ids).scatter_add_(-1, first, torch.ones_like(ids)).gather(-1, first)
    padding = ids == _NO_DOCUMENT
    sorted_facts = (
        first.masked_fill(padding, PADDING),
        (slots - first).masked_fill(padding, 0),
        length.masked_fill(padding, 0),
    )
    first, position, length = (torch.empty_like(fact).scatter_(-1, order, fact) for fact in sorted_facts)
    return first, position, length


def _check_documents(documents: Tensor, *, batch: int, keys: int, device: torch.device) -> Tensor | None:
    """int64 [B', Nk], or None where it says no more than "one document, no padding"."""
    _check_integers("documents", documents, device)
    if documents.shape != (batch, keys):
        raise ValueError(f"documents must have shape [B, Nk] = [{batch}, {keys}], got {list(documents.shape)}")
    documents = documents.to(torch.int64)
    if not can_read(device):
        return documents
    if documents.numel():
        low, high = (int(x) for x in documents.aminmax())
        if low < PADDING or high == _NO_DOCUMENT:
            raise ValueError(f"documents must hold ids in [0, 2**63 - 2], or -1 for padding, got {low} to {high}")
    if documents.numel() and bool((documents == documents[:1]).all()):
        documents = documents[:1]
        if bool((documents == documents[:, :1]).all()) and int(documents[0, 0]) >= 0:
            return None
    return documents


def _check_query_positions(
    query_positions: Tensor | None, *, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    """int64 [B', Nq], or None where queries and keys are the same tokens."""
    if query_positions is None:
        if queries != keys:
            raise ValueError(
                "query_positions is needed where q and k differ in length: it says which key each query is "
                f"(got Nq = {queries}, Nk = {keys})"
            )
        return None
    _check_integers("query_positions", query_positions, device)
    if query_positions.shape not in ((queries,), (batch, queries)):
        raise ValueError(
            f"query_positions must have shape [Nq] = [{queries}] or [B, Nq] = [{batch}, {queries}], "
            f"got {list(query_positions.shape)}"
        )
    query_positions = query_positions.to(torch.int64)
    if query_positions.dim() == 1:
        query_positions = query_positions[None]
    if can_read(device) and query_positions.numel():
        low, high = (int(x) for x in query_positions.aminmax())
        if low < 0 or high >= keys:
            raise ValueError(f"query_positions must lie in [0, Nk) = [0, {keys}), got values from {low} to {high}")
        if queries == keys and bool((query_positions == torch.arange(keys, device=device)).all()):
            return None
    return query_positions


def _check_integers(name: str, tensor: Tensor, device: torch.device) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    ):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be an integer tensor, got {got}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of k, {device}, got {tensor.device}")


def _check_tensor(name: str, tensor: Tensor, shape: str) -> None:
    dimensions = shape.count(",") + 1
    if not isinstance(tensor, Tensor) or tensor.dim() != dimensions:
        got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {got}")


def documents_from_mask(attention_mask: Tensor) -> Tensor:
    """Documents of a padding mask [B, N] (bool, or 0 and 1): one a row, padding where the mask is 0. int64 [B, N]."""
    _check_tensor("attention_mask", attention_mask, "[B, N]")
    check_mask_values(attention_mask)
    return attention_mask.to(torch.int64) - 1


def check_mask_values(attention_mask: Tensor) -> None:
    """Raise ValueError unless a padding mask is bool, or holds 0 and 1 only."""
    if attention_mask.dtype != torch.bool and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "attention_mask must be bool or hold 0 and 1 only, got other values (an additive mask? numbers of "
            "documents? those are given by position_ids that restart)"
        )


def documents_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Documents of one packed row of `total` tokens: int64 [1, total].

    `cu_seqlens` [documents + 1] holds the cumulative lengths, from 0 to `total`; a document may be empty. A last entry
    other than `total` is a ValueError: mark trailing padding with -1 in `documents` instead.
    """
    _check_tensor("cu_seqlens", cu_seqlens, "[documents + 1]")
    _check_integers("cu_seqlens", cu_seqlens, cu_seqlens.device)
    check_count("total", total, minimum=0)
    ends = cu_seqlens.to(torch.int64)
    if not len(ends) or int(ends[0]) != 0 or bool((ends[1:] < ends[:-1]).any()) or int(ends[-1]) != total:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {total}, got {ends.tolist()}")
    return torch.searchsorted(ends[1:].contiguous(), torch.arange(total, device=ends.device), right=True)[None]


def documents_from_position_ids(position_ids: Tensor) -> Tensor:
    """Documents of packed rows [B, N]: a new one begins wherever the position does not rise. int64 [B, N]."""
    _check_tensor("position_ids", position_ids, "[B, N]")
    _check_integers("position_ids", position_ids, position_ids.device)
    begins = torch.zeros_like(position_ids, dtype=torch.int64)
    begins[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    return begins.cumsum(dim=-1)
