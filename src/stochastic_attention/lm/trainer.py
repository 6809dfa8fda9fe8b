"""transformers' Trainer with rows in one global order, exact validation, and checkpoints that are whole or absent.

Every process takes its rows of a step from one global order, so that a step's batch is the same whatever the number of
processes and the size of micro-batches; only sums are formed in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from .checkpoints import check_room, clear_unfinished, finish, telling_of_a_full_disk, unfinished
from .data import Data
from .rows import IGNORED, PackedRows, Row
from .train_config import TrainingConfig

Batch = dict[str, Any]
_STREAM = "stream.pt"


class GlobalBatches(IterableDataset[Batch]):
    """The micro-batches of one process, step by step, from step `first` on.

    Rows [step * rows, (step + 1) * rows) of the training data are the step's batch; process p of P has every row whose
    place in it is p modulo P.

    Attributes:
        rows: this process's of the step that is under way.
    """

    def __init__(self, data: Data, training: TrainingConfig, *, process: int, processes: int, first: int) -> None:
        """Of process number `process` of `processes`."""
        self._data, self._training = data.train, training
        self._process, self._processes, self._first = process, processes, first
        self._micro, _ = training.micro_batches(processes)
        self.rows: list[Row] = []

    def __iter__(self) -> Iterator[Batch]:
        total = self._training.rows
        stream = None if isinstance(self._data, PackedRows) else iter(self._data)
        for step in range(self._first, self._training.total_steps):
            if stream is None:
                places = range(step * total + self._process, (step + 1) * total, self._processes)
                self.rows = [self._data[place] for place in places]
            else:  # all of them are read, so that the stream stands at the step's end in every process
                self.rows = [next(stream) for _ in range(total)][self._process :: self._processes]
            for begin in range(0, len(self.rows), self._micro):
                yield collate(self.rows[begin : begin + self._micro])


def collate(rows: list[Row]) -> Batch:
    """Rows as a model's arguments. Without a cache, for a cache hides from transformers that documents are packed."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | {"use_cache": False}


class StochasticTrainer(Trainer):
    """A Trainer on `data`, that keeps its checkpoints in `folder`. See the module."""

    def __init__(self, *, data: Data, training: TrainingConfig, folder: Path, **kwargs: Any) -> None:  # noqa: ANN401
        """`kwargs`: the Trainer's. Its `output_dir` must be `unfinished(folder)`."""
        super().__init__(**kwargs)
        self.data, self.training, self.folder = data, training, folder
        self.batches: GlobalBatches | None = None
        self._first = 0

    def resume_from(self, checkpoint: Path | None, step: int) -> None:
        """Let `train` begin its data at `step`, that of `checkpoint`."""
        self._first = step
        if checkpoint is not None and not isinstance(self.data.train, PackedRows):
            self.data.train.load_state_dict(torch.load(checkpoint / _STREAM, weights_only=True))

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """This process's micro-batches."""
        args = self.args
        self.batches = GlobalBatches(
            self.data, self.training, process=args.process_index, processes=args.world_size, first=self._first
        )
        return DataLoader(self.batches, batch_size=None, pin_memory=args.device.type == "cuda")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # noqa: ANN401, ARG002  # the Trainer's
        """The mean loss of a scored token over the validation rows, each of which counts once; `on_evaluate` follows.

        Returns:
            "eval_loss" and "eval_tokens", the number of scored tokens; of all processes together.
        """
        rows, processes = self.data.validation, self.args.world_size
        assert rows is not None
        micro, _ = self.training.micro_batches(processes)
        model = self.model
        assert model is not None
        total = torch.zeros(2, dtype=torch.float64)
        was_training = model.training
        model.eval()
        for begin in range(0, len(rows), micro * processes):
            places = range(begin + self.args.process_index, begin + micro * processes, processes)
            batch = collate([rows[place] if place < len(rows) else _unscored(rows[0]) for place in places])
            count = (batch["labels"][:, 1:] != IGNORED).sum()
            with torch.no_grad(), self.compute_loss_context_manager():
                # Run where there is nothing to score as well: a sharded model needs every process.
                loss = model(**self._prepare_inputs(batch)).loss
            if count:
                total += torch.stack([loss.detach().double().cpu() * count, count])
        model.train(was_training)
        if processes > 1:
            total = total.to(self.args.device)
            dist.all_reduce(total)
        metrics = {"eval_loss": (total[0] / total[1]).item(), "eval_tokens": int(total[1])}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ANN401
        """The Trainer's checkpoint, aside; then, once it is whole on disk, under its name."""
        step = self.state.global_step
        # Each parameter, and two moments of it; sharded, the Trainer writes parameters twice.
        copies = 4 if self.is_fsdp_enabled else 3
        needed = copies * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if self.args.should_save:
            clear_unfinished(self.folder)
            check_room(self.folder, needed)
        self._wait()
        with telling_of_a_full_disk("a checkpoint", self.folder, needed):
            super()._save_checkpoint(model, trial)
            if self.args.should_save and not isinstance(self.data.train, PackedRows):
                state = self.data.train.state_dict(step * self.training.rows)
                torch.save(state, unfinished(self.folder) / f"checkpoint-{step}" / _STREAM)
            self._wait()
            if self.args.should_save:
                finish(self.folder, step, self.training.keep)
        self._wait()

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


def _unscored(row: Row) -> Row:
    """A row like this one that counts for nothing."""
    return row | {"labels": torch.full_like(row["labels"], IGNORED)}
