"""Caches for swapped layers: all keys are kept where the model itself would keep a sliding window of them."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


def keep_all_keys(cache: Cache, layers: Iterable[int], longest: int | None = None) -> None:
    """Replace the sliding layers among `layers` of an empty cache by full ones, in place.

    Args:
        cache: of any class; layers that it does not have yet are made full later, by transformers.
        layers: indices of the layers whose own window is swapped away.
        longest: tokens to make room for in a static cache; None: as other layers of the cache do.

    Raises:
        ValueError: such a layer has dropped keys already, or is of an unknown kind, or nothing says how long a static
            cache is meant to be.
    """
    for index in layers:
        if index >= len(cache.layers) or not getattr(cache.layers[index], "is_sliding", False):
            continue
        layer = cache.layers[index]
        if int(layer.get_seq_length()):  # pyright: ignore[reportAttributeAccessIssue] - what slides has it
            raise ValueError(
                f"the cache must be empty, or made for this swapped model: its layer {index} has been filled as a "
                "sliding window, which may have dropped keys that the swapped layer needs"
            )
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(longest or _longest(cache, index))
        else:
            raise ValueError(
                f"layer {index} of the cache must be a dynamic or static one for a swapped layer, got "
                f"{type(layer).__name__}"
            )


def _longest(cache: Cache, index: int) -> int:
    for layer in cache.layers:
        if type(layer) is StaticLayer:
            return layer.max_cache_len
    raise ValueError(
        f"nothing says how many tokens a static cache must hold for the swapped layer {index}: all its layers "
        "were made as sliding windows; make it from a copy of the config whose sliding_window is None"
    )
