"""The methods of the comparison: each a family of patterns that one integer scale makes wider or narrower.

Adding one is one entry of `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..hf.presets import Preset, load_preset
from ..ops.pattern import Pattern
from .budget import Match, Queries, closest

REFERENCE = "full"
# Begins the name of a method that is what a file says, at no budget but its own.
PRESET = "preset:"
# StreamingLLM's number; the paper's own window has none.
SINKS = 4


@dataclass(frozen=True)
class Method:
    """What a method may run.

    Attributes:
        candidates: given the longest document's tokens, every pattern to choose among, from few keys to many; of those
            with as many, preferred ones first.
        is_random: whether the pattern takes a seed, so that runs over seeds differ.
    """

    candidates: Callable[[int], Iterable[Pattern]]
    is_random: bool = False

    def fit(self, queries: Queries, budget: float, match: Match) -> Pattern:
        """The candidate nearest to `budget` on these queries, with seed 0."""
        return closest(self.candidates(queries.longest), queries, budget, match)


def _scales(make: Callable[[int], Pattern]) -> Callable[[int], Iterable[Pattern]]:
    return lambda longest: (make(scale) for scale in range(1, longest + 1))


def _moba_fine(longest: int) -> Iterable[Pattern]:
    sizes = sorted(range(12, 21), key=lambda size: abs(size - 16))
    for top_k in range(1, longest // min(sizes) + 2):
        for block_size in sizes:
            yield Pattern.moba(block_size=block_size, top_k=top_k)


def _strided(window: int, longest: int) -> Pattern:
    """A local window, and as many keys again that span the longest document."""
    return Pattern.strided(window, math.ceil(longest / window), local=window, sinks=SINKS)


def _bigbird(keys: int) -> Pattern:
    """Half of the keys in the local window and half in random blocks: two or more of them."""
    size = max(1, min(16, keys // 4))  # 16 is the default of BigBird's own code
    blocks = max(1, round(keys / 2 / size))
    return Pattern.bigbird(size, blocks, local=max(0, keys - blocks * size), sinks=SINKS)


def _union(window: int, **options: str) -> Pattern:
    return Pattern.stochastic(window, local=window, sinks=SINKS, correction=0.5, **options)  # type: ignore[arg-type]


METHODS: dict[str, Method] = {
    "full": Method(lambda _: (Pattern.full(),)),
    "swa": Method(_scales(lambda w: Pattern.local(w))),
    "swa+sinks": Method(_scales(lambda w: Pattern.local(w, sinks=SINKS))),
    "strided": Method(lambda longest: (_strided(w, longest) for w in range(1, longest + 1))),
    "sa": Method(_scales(lambda w: Pattern.stochastic(w)), is_random=True),
    "sa-block": Method(_scales(lambda w: Pattern.stochastic(w, shape="block")), is_random=True),
    "sa-prefix": Method(_scales(lambda w: Pattern.stochastic(w, scope="prefix")), is_random=True),
    "union": Method(_scales(_union), is_random=True),
    "union-block": Method(_scales(lambda w: _union(w, shape="block")), is_random=True),
    "union-prefix": Method(_scales(lambda w: _union(w, scope="prefix")), is_random=True),
    "bigbird": Method(_scales(_bigbird), is_random=True),
    "moba": Method(_moba_fine),
    "moba-k2": Method(_scales(lambda size: Pattern.moba(block_size=size, top_k=2))),
}


def check_methods(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is neither in `METHODS` nor that of a preset."""
    unknown = [name for name in names if preset_of(name) is None and name not in METHODS]
    if unknown:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, {PRESET}FILE, got {', '.join(unknown)}")


def preset_of(name: str) -> Preset | None:
    """The preset that a method's name stands for, None for a name without a file; ValueError for no such file."""
    return load_preset(name.removeprefix(PRESET)) if name.startswith(PRESET) else None
