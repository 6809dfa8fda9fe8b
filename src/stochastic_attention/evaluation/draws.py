"""What is random in a model itself."""

from __future__ import annotations

from ..hf.plan import NAME, read
from ..models import LanguageModel


def has_chance(language: LanguageModel) -> bool:
    """Whether a layer of the model draws orders, so that routing steps (`hf.set_step`) give different figures."""
    config = language.model.config
    return config._attn_implementation == NAME and any(plan.pattern.is_random for plan in read(config).layers.values())
