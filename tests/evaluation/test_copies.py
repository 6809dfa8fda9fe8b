"""The distance of the earlier copy: written out, and by search."""

import pytest
import torch

from stochastic_attention.evaluation.copies import CHANGED, NEW, copy_distances


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the cue "ab" comes back after three tokens, once with the same "c" behind it, once with another
        ("abcabcabd", [NEW, NEW, NEW, NEW, NEW, 3, 3, 3, CHANGED]),
        ("aaaa", [NEW, NEW, NEW, 1]),
        # the last occurrence counts, here with "d", and no earlier one with "c"
        ("abcabdabc", [NEW, NEW, NEW, NEW, NEW, CHANGED, NEW, NEW, CHANGED]),
        ("abcabdabd", [NEW, NEW, NEW, NEW, NEW, CHANGED, NEW, NEW, 3]),
        ("abcdef", [NEW] * 6),
        ("ab", [NEW] * 2),
        ("a", [NEW]),
        ("", []),
    ],
)
def test_written_out(text, expected):
    assert copy_distances([ord(letter) for letter in text]) == expected


def test_the_copy_has_the_same_two_tokens_before_it():
    tokens = torch.randint(4, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    found = copy_distances(tokens)
    for place, distance in enumerate(found[2:], start=2):
        earlier = [s for s in range(2, place) if tokens[s - 2 : s] == tokens[place - 2 : place]]
        if not earlier:
            assert distance == NEW
        elif tokens[earlier[-1]] == tokens[place]:
            assert distance == place - earlier[-1]
        else:
            assert distance == CHANGED
    assert {min(distance, 1) for distance in found} == {CHANGED, NEW, 1}
