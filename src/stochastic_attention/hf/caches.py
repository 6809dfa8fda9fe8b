"""Caches for swapped layers: all keys are kept where the model itself would keep a sliding window of them."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


def keep_all_keys(cache: Cache, windows: Mapping[int, int], longest: int | None = None) -> None:
    """Replace the sliding layers of an empty cache by full ones, in place, where their windows are swapped away.

    Args:
        cache: of any class; layers that it does not have yet are made full later, by transformers.
        windows: the window of each such layer, by index.
        longest: tokens that static caches are made for, as far as the model knows.

    Raises:
        ValueError: such a layer has been filled already, or is of an unknown kind, or nothing says how long a static
            cache is meant to be.
    """
    for index, window in windows.items():
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
            # A layer made for fewer tokens than its window says how many; else one without a window does.
            full = [other.max_cache_len for other in cache.layers if type(other) is StaticLayer]
            length = layer.max_cache_len if layer.max_cache_len < window else full[0] if full else longest
            if length is None:
                raise ValueError(
                    f"nothing says how many tokens a static cache must hold for the swapped layer {index}: all its "
                    "layers were made as sliding windows; make it from a copy of the config whose sliding_window is "
                    "None"
                )
            cache.layers[index] = StaticLayer(length)
        else:
            raise ValueError(
                f"layer {index} of the cache must be a dynamic or static one for a swapped layer, got "
                f"{type(layer).__name__}"
            )
