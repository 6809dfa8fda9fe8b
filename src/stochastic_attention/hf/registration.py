"""The name under which transformers finds swapped attention, in both of its registries.

A function that is registered for attention alone is handed no mask at all: padding and packing would be lost.
"""

from __future__ import annotations

import warnings

import transformers
from packaging.specifiers import SpecifierSet
from transformers import AttentionInterface, AttentionMaskInterface

from .attend import attend
from .masks import build_masks
from .plan import NAME

SUPPORTED_VERSIONS = ">=5.17,<6"


def register() -> None:
    """Register the attention and the mask function with transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, build_masks)


def check_version() -> None:
    """Warn where transformers is of a version that this package was not tried with."""
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(transformers.__version__, prereleases=True):
        warnings.warn(
            f"stochastic_attention.hf is written for transformers {SUPPORTED_VERSIONS}, got "
            f"{transformers.__version__}: check that report(model) counts a call of every layer",
            stacklevel=3,
        )
