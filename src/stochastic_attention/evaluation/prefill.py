"""Prefill time: one forward pass over a whole prompt, every pattern in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..hf import Preset, restore, swap
from ..hf.plan import check_swappable
from ..hf.presets import native_patterns
from ..ops.pattern import Pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def attending(model: PreTrainedModel, pattern: Pattern | Preset, backend: str | None = None) -> Iterator[None]:
    """Let every layer of `model` attend by a pattern inside the block, or swap a preset into it.

    Full attention is the untouched model, its sliding windows included (see `attended`).
    """
    check_swappable(model.config)
    if pattern == Pattern.full():
        yield
        return
    preset = Preset(pattern, "all") if isinstance(pattern, Pattern) else pattern
    swap(model, *preset, backend=backend)
    try:
        yield
    finally:
        restore(model)


def attended(model: PreTrainedModel, pattern: Pattern | Preset) -> list[Pattern]:
    """What each layer of `model` runs inside of `attending`."""
    config = model.config.get_text_config()
    if isinstance(pattern, Preset):
        return pattern.layer_patterns(config)
    return native_patterns(config) if pattern == Pattern.full() else [pattern] * config.num_hidden_layers


@torch.inference_mode()
def prefill_times(
    model: PreTrainedModel,
    patterns: Sequence[Pattern | Preset],
    *,
    length: int,
    repeats: int,
    backend: str | None = None,
    on_pass: Callable[[], object] | None = None,
) -> list[list[float]]:
    """Milliseconds of each pattern's `repeats` passes over one row of `length` tokens.

    The patterns take turns, so that what else the machine does falls on all alike; a first turn of each is not counted.
    """
    tokens = (torch.arange(length, device=model.device) % model.config.get_text_config().vocab_size)[None]
    mask = torch.ones_like(tokens)
    times: list[list[float]] = [[] for _ in patterns]
    for turn in range(repeats + 1):
        for index, pattern in enumerate(patterns):
            with attending(model, pattern, backend):
                _synchronize(model.device)
                start = time.perf_counter()
                model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=1)
                _synchronize(model.device)
                elapsed = time.perf_counter() - start
            if turn:
                times[index].append(1e3 * elapsed)
            if on_pass is not None:
                on_pass()
    return times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
