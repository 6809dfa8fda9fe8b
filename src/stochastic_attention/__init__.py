"""Stochastic attention: windowed attention in a random order, exact, linear in the sequence length.

`import stochastic_attention` needs torch alone and has no side effect.
"""

from .ops.api import attention
from .ops.backends import backend_names
from .ops.keys_per_query import keys_per_query
from .ops.layout import documents_from_cu_seqlens, documents_from_mask, documents_from_position_ids
from .ops.pattern import Pattern

__version__ = "0.1.0"

__all__ = [
    "Pattern",
    "__version__",
    "attention",
    "backend_names",
    "documents_from_cu_seqlens",
    "documents_from_mask",
    "documents_from_position_ids",
    "keys_per_query",
]
