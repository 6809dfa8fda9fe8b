"""LAMBADA: the last word of a passage, which takes the whole passage to guess."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...records import Estimate
from ..requests import Item, Request, Score
from .base import Task, TaskOptions, encode_pair, mean, perplexity, spread
from .json_lines import json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "lambada_openai.jsonl"


class Lambada(Task):
    """Rows {"context", "continuation"}; right where greedy decoding gives every token of " " + continuation."""

    headline: ClassVar[str] = "acc"
    higher_is_better: ClassVar[bool] = True

    def missing(self, options: TaskOptions) -> str | None:
        """The file, where it is not in the data folder."""
        if options.data is None:
            return f"it needs --data DIR, a folder that holds {FILE}"
        return None if self._path(options).is_file() else f"data must be a folder that holds {FILE}, got {options.data}"

    def source(self, options: TaskOptions) -> str:
        """The file."""
        return str(self._path(options))

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` rows, evenly spaced."""
        rows = spread(list(json_lines(self._path(options), "context", "continuation")), limit, f"rows of {FILE}")
        pairs = [encode_pair(tokenizer, row["context"], " " + row["continuation"]) for row in rows]
        return [Item((Request(tuple(tokens), scored),)) for tokens, scored in pairs]

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Accuracy, and perplexity a token of the last word."""
        return {"acc": mean([float(row[0].is_greedy) for row in scores]), "perplexity": perplexity(items, scores)}

    def _path(self, options: TaskOptions) -> Path:
        assert options.data is not None
        return options.data / FILE
