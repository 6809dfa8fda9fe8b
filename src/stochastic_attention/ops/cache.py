"""Where what is made once and kept between runs is stored: compiled kernels, dequantised models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$SATTN_CACHE, else stochastic-attention in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    own = os.environ.get("SATTN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stochastic-attention"
