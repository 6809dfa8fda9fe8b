"""Fresh permutations at every optimizer step of a transformers Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..ops.validation import check_count
from .swap import set_step


class RoutingStep(TrainerCallback):
    """Drive a swapped model's routing step from the Trainer: `Trainer(model, callbacks=[RoutingStep()], ...)`.

    An optimizer step runs, with all its micro-batches, at the Trainer's `global_step`, which counts the optimizer steps
    done before: every step draws its own permutations, and a resumed run draws what the unbroken one would have drawn.
    Whatever runs between optimizer steps runs at `evaluation_step`: evaluation before, during and after training always
    sees the same permutations, so its numbers compare, and it leaves training's draws alone. The trained model stays at
    `evaluation_step`.

    The swapped model may be wrapped (DistributedDataParallel, PEFT, `torch.compile`): the outermost transformers model
    is meant. Given to the Trainer at construction, the callback sets `evaluation_step` at once; added later, when
    training begins.

    Raises:
        ValueError: `evaluation_step` is out of its domain; from the Trainer: its model is not swapped.
    """

    def __init__(self, evaluation_step: int = 0) -> None:
        """`evaluation_step`: the routing step outside of optimizer steps, in [0, 2**63)."""
        check_count("evaluation_step", evaluation_step, minimum=0, maximum=2**63 - 1)
        self.evaluation_step = evaluation_step

    def on_step_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401  # whatever a Trainer hands to its callbacks
    ) -> None:
        """Before the first micro-batch of an optimizer step."""
        _set_step_inside(kwargs["model"], state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """After an optimizer step, before the Trainer evaluates; and before the first one."""
        _set_step_inside(kwargs["model"], self.evaluation_step)

    on_init_end = on_train_begin = on_step_end


def _set_step_inside(model: nn.Module, step: int) -> None:
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(
            f"RoutingStep needs a swapped transformers model, got a {type(model).__name__} that is none and holds none"
        )
    set_step(inner, step)
