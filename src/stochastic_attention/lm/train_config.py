"""What a training run is: the sections of its YAML file, checked as a whole before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..ops.validation import check_count, check_real
from .data import DataConfig
from .sections import apply_settings, read_section, read_yaml
from .tokenizer import TokenizerConfig

# What a resumed run may change: it says where and how the steps run or what is written, not what they compute.
MAY_CHANGE = (
    "training.micro_batch",
    "training.gradient_checkpointing",
    "training.log_every",
    "training.save_every",
    "training.eval_every",
    "training.keep",
    "training.device",
    "training.peak_flops",
)


@dataclass(frozen=True)
class TrainingConfig:
    """Section `training`.

    Attributes:
        sequence_length: tokens N of a row.
        learning_rate: the largest, met after the warm-up.
        steps: optimizer steps; or
        tokens: tokens to train on, rounded up to whole steps.
        global_batch_sequences: rows of an optimizer step, over all processes and micro-batches; or
        global_batch_tokens: the same in tokens, a multiple of N.
        micro_batch: rows that a process runs at once (None: all of its share). Gradients add up over micro-batches.
        warmup_steps: steps over which the learning rate rises from 0; it then falls along a cosine.
        min_learning_rate: where the cosine ends.
        weight_decay: of AdamW, on matrices; not on biases and norms.
        betas: of AdamW.
        clip: largest norm of the gradient, None for no clipping.
        precision: "fp32", or "bf16": autocast over float32 parameters.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
        log_every: steps from one line of loss.jsonl to the next.
        save_every: steps from one checkpoint to the next; the last step is always one.
        eval_every: steps from one validation to the next, None for never.
        keep: the newest checkpoints that are kept.
        seed: of the weights, and of the order of the data.
        parallel: "none" (one process), "ddp" (each process a copy) or "fsdp2" (parameters sharded).
        torch_compile: compile the model's forward and backward passes.
        device: "auto" (an accelerator where there is one), "cpu" or "cuda".
        peak_flops: of one device, for the utilisation; None takes a table of cards, or measures.
    """

    sequence_length: int
    learning_rate: float
    steps: int | None = None
    tokens: int | None = None
    global_batch_sequences: int | None = None
    global_batch_tokens: int | None = None
    micro_batch: int | None = None
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    clip: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_checkpointing: bool = False
    log_every: int = 1
    save_every: int = 500
    eval_every: int | None = None
    keep: int = 2
    seed: int = 0
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    torch_compile: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        """Check ranges, and what is given one way or the other."""
        check_count("training.sequence_length", self.sequence_length, minimum=2)
        check_count("training.seed", self.seed, minimum=0, maximum=2**32 - 1)
        for name in ("log_every", "save_every", "keep"):
            check_count(f"training.{name}", getattr(self, name), minimum=1)
        for name in ("steps", "tokens", "global_batch_sequences", "global_batch_tokens", "micro_batch", "eval_every"):
            if getattr(self, name) is not None:
                check_count(f"training.{name}", getattr(self, name), minimum=1)
        for one, other in (("steps", "tokens"), ("global_batch_sequences", "global_batch_tokens")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(
                    f"training.{one} or training.{other} must be given, and not both, "
                    f"got {getattr(self, one)!r} and {getattr(self, other)!r}"
                )
        if self.global_batch_tokens is not None and self.global_batch_tokens % self.sequence_length:
            raise ValueError(
                f"training.global_batch_tokens must be a multiple of sequence_length {self.sequence_length}, "
                f"got {self.global_batch_tokens}"
            )
        check_count("training.warmup_steps", self.warmup_steps, minimum=0, maximum=self.total_steps)
        check_real("training.learning_rate", self.learning_rate, above=0.0)
        check_real("training.min_learning_rate", self.min_learning_rate, minimum=0.0)
        check_real("training.weight_decay", self.weight_decay, minimum=0.0)
        for name in ("clip", "peak_flops"):
            if getattr(self, name) is not None:
                check_real(f"training.{name}", getattr(self, name), above=0.0)
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"training.min_learning_rate must be at most learning_rate {self.learning_rate}, "
                f"got {self.min_learning_rate}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas must be two numbers in [0, 1), got {list(self.betas)}")

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        return self.global_batch_sequences or (self.global_batch_tokens or 0) // self.sequence_length

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows * self.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps or -(-(self.tokens or 0) // self.step_tokens)

    def micro_batches(self, processes: int) -> tuple[int, int]:
        """(rows of a micro-batch, micro-batches of a step) of each of so many processes; ValueError if uneven."""
        share, rest = divmod(self.rows, processes)
        if rest:
            raise ValueError(
                f"training.global_batch_sequences ({self.rows} rows a step) must be a multiple of the number of "
                f"processes, got {processes}"
            )
        micro = self.micro_batch or share
        if share % micro:
            raise ValueError(
                f"training.micro_batch must divide the {share} rows of a step that each of {processes} processes has, "
                f"got {micro}"
            )
        return micro, share // micro


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. `model`: model_type, as transformers calls it, and fields of that type's configuration."""

    model: dict[str, Any]
    tokenizer: TokenizerConfig
    data: DataConfig
    training: TrainingConfig

    def __post_init__(self) -> None:
        """Check what one section says of another."""
        if (self.training.eval_every is None) != (self.data.validation is None):
            raise ValueError(
                "training.eval_every and data.validation must be given together, "
                f"got {self.training.eval_every!r} and {self.data.validation!r}"
            )

    def plain(self) -> dict[str, Any]:
        """Every setting, defaults filled in, as JSON and YAML hold them."""
        return _plain(asdict(self))


def read_config(path: Path, settings: list[str]) -> TrainConfig:
    """A run from a YAML file and settings "section.key=value" over it; ValueError that names the key otherwise."""
    found = read_yaml(path)
    apply_settings(found, settings)
    return read_section(TrainConfig, "", found)


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a run may not be resumed with, in words: every setting that differs and is not one of `MAY_CHANGE`.

    The number of steps may grow: the learning rate then follows the longer run's schedule from there on. One process
    and "ddp" are the same run.
    """
    before, after = _flat(old), _flat(new)
    told = []
    for key in sorted({*before, *after}):
        was, now = before.get(key), after.get(key)
        if was == now or key in MAY_CHANGE:
            continue
        if key in ("training.steps", "training.tokens") and was is not None and now is not None and now > was:
            continue
        if key == "training.parallel" and {was, now} == {"none", "ddp"}:
            continue
        told.append(f"{key} was {was!r}, now {now!r}")
    return told


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in mapping.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _plain(value: Any) -> Any:  # noqa: ANN401  # nested settings
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
