"""How far back the context that a token needs lies: the distance of the earlier copy that foretells it.

The cue of a token x[t] of a sequence is the two tokens before it. With s < t the last place before which the same cue
stood, the token is

    a repeat   x[s] = x[t]: at the distance t - s, where a model that reaches so far may look it up
    changed    another token stood there
    new        the cue did not occur, or there is none

The query that predicts x[t], at t - 1, sees the copy in one layer only through a window of t - s tokens or more.
"""

from __future__ import annotations

from collections.abc import Sequence

# Stand in place of a distance, which is at least 1.
NEW, CHANGED = 0, -1


def copy_distances(tokens: Sequence[int]) -> list[int]:
    """Of each token the distance of its earlier copy, or `NEW`, or `CHANGED`."""
    last: dict[tuple[int, int], int] = {}
    found = [NEW] * min(2, len(tokens))
    for place in range(2, len(tokens)):
        cue = tokens[place - 2], tokens[place - 1]
        copy = last.get(cue)
        found.append(NEW if copy is None else place - copy if tokens[copy] == tokens[place] else CHANGED)
        last[cue] = place
    return found
