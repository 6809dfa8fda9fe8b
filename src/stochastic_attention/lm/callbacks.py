"""What happens around the optimizer steps of a run: logging, the progress bar, stopping on a signal, refusing NaN."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..plots import plot_training
from .loss_log import LossLog
from .train_config import TrainingConfig


class NotFiniteError(ArithmeticError):
    """A step's loss or gradient is NaN or infinite."""


class StopSignals:
    """SIGTERM and SIGINT ask for a checkpoint and an end, within the context; a second one ends the process at once.

    Attributes:
        received: the signal that came, None so far.
    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are not ours to take
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StopOnSignal(TrainerCallback):
    """After the step in which a signal came to any process: save, and stop."""

    def __init__(self, signals: StopSignals) -> None:
        """`signals`: of this process."""
        self._signals = signals
        self.stopped_by: int | None = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401, ARG002  # whatever a Trainer hands to its callbacks
    ) -> None:
        """Agree with the other processes: all stop after the same step, or none."""
        received = self._signals.received or 0
        if args.world_size > 1:
            number = torch.tensor(received, device=args.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            received = int(number)
        if received and state.global_step < state.max_steps:
            self.stopped_by = received
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # whoever sent the signal may not wait for it


class RunLog(TrainerCallback):
    """Writes loss.jsonl, validation.jsonl and loss.png and moves the progress bar, on the first process.

    A line of loss.jsonl has the loss of its own step, over the whole global batch, so that it does not depend on where
    the lines before it are. Speed is over the steps since the last line, without validation and saving.
    """

    def __init__(self, output: Path, training: TrainingConfig, *, token_flops: float, peak_flops: float) -> None:
        """`token_flops`: of a forward and backward pass for a token; `peak_flops`: of all devices together."""
        self.losses = LossLog(output / "loss.jsonl")
        self.validations = LossLog(output / "validation.jsonl")
        self._picture = output / "loss.png"
        self._training = training
        self._token_flops, self._peak_flops = token_flops, peak_flops
        self._bar: tqdm[Any] | None = None
        self._spent, self._steps, self._begun = 0.0, 0, 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """Take the files back to the step at which the run goes on."""
        # A resumed state comes with the intervals of the run before.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            self.losses.truncate(state.global_step)
            self.validations.truncate(state.global_step)
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                desc="training",
                mininterval=1.0,
                dynamic_ncols=True,
            )
        self._begun = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """After every optimizer step, before anything is saved: refuse NaN, then tell."""
        logs: dict[str, Any] = kwargs["logs"]
        state.log_history.clear()  # loss.jsonl has it; a checkpoint need not
        if "loss" not in logs:  # the Trainer's summary at the end
            return
        now = time.perf_counter()
        self._spent, self._steps, self._begun = self._spent + now - self._begun, self._steps + 1, now
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise NotFiniteError(f"{name} is {logs[name]} at step {state.global_step}")
        if not state.is_world_process_zero:
            return
        speed = self._steps * self._training.step_tokens / self._spent
        assert self._bar is not None
        self._bar.set_postfix(loss=f"{logs['loss']:.3f}", tokens_per_second=f"{speed:.0f}", refresh=False)
        self._bar.update(state.global_step - self._bar.n)
        if state.global_step % self._training.log_every and state.global_step != state.max_steps:
            return
        self.losses.append(
            step=state.global_step,
            tokens=state.global_step * self._training.step_tokens,
            loss=logs["loss"],
            learning_rate=logs["learning_rate"],
            grad_norm=logs["grad_norm"],
            tokens_per_second=round(speed, 1),
            mfu=round(speed * self._token_flops / self._peak_flops, 4),
            time=round(time.time(), 3),
        )
        self._spent, self._steps = 0.0, 0

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """After a validation."""
        loss, scored = kwargs["metrics"]["eval_loss"], kwargs["metrics"]["eval_tokens"]
        if not math.isfinite(loss):
            raise NotFiniteError(f"validation loss is {loss} after step {state.global_step}")
        if state.is_world_process_zero:
            perplexity = math.exp(min(loss, 700.0))  # the largest that a float holds is near exp(709)
            self.validations.append(
                step=state.global_step,
                tokens=state.global_step * self._training.step_tokens,
                loss=loss,
                perplexity=perplexity,
                scored_tokens=scored,
            )
            tqdm.write(f"step {state.global_step}: validation loss {loss:.4f}, perplexity {perplexity:.2f}")
        self._begun = time.perf_counter()

    def on_save(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """After a checkpoint."""
        if state.is_world_process_zero:
            self.losses.sync()
            self.validations.sync()
            plot_training(self.losses.entries(), self.validations.entries(), self._picture)
        self._begun = time.perf_counter()

    def close(self) -> None:
        """Leave the progress bar as it stands."""
        if self._bar is not None:
            self._bar.close()
