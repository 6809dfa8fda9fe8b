"""Documents: what the helpers make of masks, cumulative lengths and position ids, and where tokens then stand."""

from __future__ import annotations

import pytest
import torch

from stochastic_attention import documents_from_cu_seqlens, documents_from_mask, documents_from_position_ids
from stochastic_attention.ops.layout import make_layout


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32], ids=str)
def test_a_mask_is_one_document_a_row(dtype):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]], dtype=dtype)
    documents = documents_from_mask(mask)
    assert documents.dtype == torch.int64
    assert documents.tolist() == [[-1, -1, 0, 0], [0, 0, 0, -1]]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([0], []),
        ([0, 3], [0, 0, 0]),
        ([0, 2, 5], [0, 0, 1, 1, 1]),
        ([0, 0, 1, 1, 6, 6], [1, 3, 3, 3, 3, 3]),
    ],
    ids=str,
)
def test_cumulative_lengths(ends, expected):
    for dtype in (torch.int32, torch.int64):
        assert documents_from_cu_seqlens(torch.tensor(ends, dtype=dtype), len(expected)).tolist() == [expected]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1, 2, 3], [0, 0, 0, 0]),
        ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([0, 0, 0, 1], [0, 1, 2, 2]),
        ([5, 6, 9, 3], [0, 0, 0, 1]),
        ([], []),
    ],
    ids=str,
)
def test_position_ids_that_restart(ids, expected):
    assert documents_from_position_ids(torch.tensor([ids], dtype=torch.int64)).tolist() == [expected]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: documents_from_mask(torch.ones(4)), r"attention_mask.*\[B, N\], got \[4\]"),
        (lambda: documents_from_mask(torch.ones(1, 1, 4, 4)), r"attention_mask.*got \[1, 1, 4, 4\]"),
        (lambda: documents_from_mask(torch.tensor([[0.0, -1e9]])), r"attention_mask must be bool or hold 0 and 1"),
        (lambda: documents_from_mask([[1, 1]]), r"attention_mask.*list"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0, 944]), 946), r"cu_seqlens.*946, got \[0, 944\]"),
        (lambda: documents_from_cu_seqlens(torch.tensor([1, 4]), 4), r"cu_seqlens.*got \[1, 4\]"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0, 3, 2, 4]), 4), r"cu_seqlens.*got \[0, 3, 2, 4\]"),
        (lambda: documents_from_cu_seqlens(torch.tensor([[0, 4]]), 4), r"cu_seqlens.*\[1, 2\]"),
        (lambda: documents_from_cu_seqlens(torch.tensor([], dtype=torch.int64), 0), r"cu_seqlens.*got \[\]"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0.0, 4.0]), 4), r"cu_seqlens.*float32"),
        (lambda: documents_from_cu_seqlens([0, 4], 4), r"cu_seqlens.*list"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0, 4]), 4.0), r"total.*4\.0"),
        (lambda: documents_from_position_ids(torch.arange(4)), r"position_ids.*got \[4\]"),
        (lambda: documents_from_position_ids([[0, 1]]), r"position_ids.*list"),
        (lambda: documents_from_position_ids(torch.tensor([[0.0, 0.5]])), r"position_ids.*float32"),
    ],
)
def test_what_cannot_be_a_layout_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_places_of_interleaved_documents():
    documents = torch.tensor([[7, -1, 2, 7, 2, 2]])
    layout = make_layout(documents, None, batch=1, queries=6, keys=6, device=torch.device("cpu"))
    assert layout.position.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert layout.length.tolist() == [[2, 0, 3, 2, 3, 3]]
    assert layout.longest == 3
    assert (layout.first < 0).tolist() == [[False, True, False, False, False, False]]
    assert layout.packed.tolist() == [[3, 5, 0, 4, 1, 2]]


@pytest.mark.parametrize(
    "documents", [None, torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), 3)], ids=["none", "0", "3"]
)
def test_one_document_without_padding_is_known_without_reading(documents):
    layout = make_layout(documents, torch.arange(5), batch=2, queries=5, keys=5, device=torch.device("cpu"))
    assert layout.is_single
