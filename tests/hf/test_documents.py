"""Masks, and documents from padding and positions."""

import pytest
import torch
import transformers

from stochastic_attention import Pattern
from stochastic_attention.hf import configure
from stochastic_attention.hf.masks import build_masks, documents_of

N = None


@pytest.mark.parametrize(
    ("real", "positions", "expected"),
    [
        (N, N, N),
        (N, [0, 1, 2, 3, 4, 5], N),
        (N, [7, 8, 9, 10, 11, 12], N),
        (N, [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]),
        (N, [4, 5, 6, 2, 3, 4], [0, 0, 0, 1, 1, 1]),
        (N, [0, 0, 0, 1, 0, 1], [0, 1, 2, 2, 3, 3]),
        ([0, 0, 1, 1, 1, 1], N, [-1, -1, 0, 0, 0, 0]),
        ([0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5], [-1, -1, 0, 0, 0, 0]),
        ([0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 2, 3], [-1, -1, 0, 0, 0, 0]),
        ([1, 1, 1, 1, 0, 0], [0, 1, 2, 3, 1, 1], [0, 0, 0, 0, -1, -1]),
        ([1, 1, 0, 0, 1, 1], [0, 1, 2, 3, 4, 5], [0, 0, -1, -1, 0, 0]),
        ([1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 2, 3], [0, 0, -1, -1, 0, 0]),
        ([1, 1, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1], [0, 0, -1, -1, 1, 1]),
        ([1, 1, 0, 1, 1, 1], [0, 1, -1, 0, 1, 2], [0, 0, -1, 1, 1, 1]),
        ([0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [-1] * 6),
    ],
    ids=[
        "nothing said",
        "one document",
        "one document from its middle",
        "two documents",
        "two documents from their middles",
        "documents of one token",
        "left padding",
        "left padding that counts",
        "left padding that does not count",
        "right padding that does not count",
        "padding inside a document that counts",
        "padding inside a document that does not count",
        "padding between documents",
        "padding one position before a document",
        "padding alone",
    ],
)
def test_documents(real, positions, expected):
    real = real and torch.tensor([real, [1] * 6]).bool()
    positions = positions and torch.tensor([positions])
    found = documents_of(real, positions, batch=2, tokens=6)
    assert (found is None) == (expected is None)
    assert found is None or found[0].tolist() == expected


def test_each_row_has_documents_of_its_own():
    found = documents_of(None, torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), batch=2, tokens=4)
    assert found.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 5, 6]], "1 followed by 5 in row 0"),
        ([[0, 1, 2]], r"position_ids must have shape \[2, 4\], got \[1, 3\]"),
        ([[0, 1, 2, 3]] * 3, r"position_ids must have shape \[2, 4\], got \[3, 4\]"),
    ],
    ids=["a jump", "too short", "too many rows"],
)
def test_positions_that_say_nothing_clear(positions, message):
    with pytest.raises(ValueError, match=message):
        documents_of(None, torch.tensor(positions), batch=2, tokens=4)


CONFIG = configure(transformers.LlamaConfig(num_hidden_layers=2), Pattern.stochastic(4))


def test_masks_of_a_model_swapped_whole_are_linear_in_its_length():
    tokens = 1_000_000
    padding = torch.arange(tokens)[None] > 3
    masks = build_masks(q_length=tokens, kv_length=tokens, attention_mask=padding, config=CONFIG, batch_size=1)
    assert masks.native is None
    assert torch.equal(masks.real, padding)


def test_custom_mask_functions_are_refused():
    with pytest.raises(ValueError, match="a custom mask function"):
        build_masks(batch_size=1, q_length=4, kv_length=4, use_vmap=True, config=CONFIG)
