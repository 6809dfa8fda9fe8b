"""The names under which transformers finds swapped attention, in both of its registries.

A function that is registered for attention alone is handed no mask at all: padding and packing would be lost.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial

import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .attend import attend
from .masks import build_masks

SUPPORTED_VERSIONS = ">=5.17,<6"

# Implementations that layers left alone can keep.
NATIVES = ("sdpa", "eager")

_NAME = "stochastic_attention"


def implementation_name(native: str | None) -> str:
    """The registered name; `native` is the implementation of the layers that are not swapped, None where all are."""
    return _NAME if native is None else f"{_NAME}+{native}"


def register() -> None:
    """Register attention and mask functions with transformers. Calling it again changes nothing."""
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(transformers.__version__, prereleases=True):
        warnings.warn(
            f"stochastic_attention.hf is written for transformers {SUPPORTED_VERSIONS}, got "
            f"{transformers.__version__}: check that report(model) counts a call of every layer",
            stacklevel=3,
        )
    for native in (None, *NATIVES):
        AttentionInterface.register(implementation_name(native), attend)
        AttentionMaskInterface.register(implementation_name(native), partial(build_masks, native=native))


def native_function(attention_class: type, native: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that modules of `attention_class` run under the implementation `native`."""
    if native != "eager":
        return AttentionInterface()[native]
    # transformers keeps no registry of eager functions: each modeling file has its own, under this name.
    return sys.modules[attention_class.__module__].eager_attention_forward
