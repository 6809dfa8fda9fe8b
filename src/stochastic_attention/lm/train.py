"""A training run from its configuration: build, train, save, record. Launched alone or by torchrun.

OUTPUT/config.yaml        every setting; a run is resumed with these and no others
OUTPUT/data.json          where its tokens came from, and their digest; a run is resumed with the same
OUTPUT/data/              tokens and a learned tokenizer
OUTPUT/checkpoints/       see `checkpoints`
OUTPUT/loss.jsonl         a line a step; validation.jsonl, loss.png
OUTPUT/model/             at the end: model and tokenizer in Hugging Face form
OUTPUT/record.json        at the end: command, configuration, environment, results
"""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import set_seed

from ..hf import RoutingStep
from ..hf.plan import NAME
from ..records import Environment, Record, write_text
from .callbacks import NotFiniteError, RunLog, StopOnSignal, StopSignals
from .checkpoints import clear_unfinished, newest_checkpoint, step_of, telling_of_a_full_disk
from .data import Data, open_data
from .flops import attended_keys, device_peak, flops_per_token
from .setup import make_model_config, training_arguments
from .tokenizer import make_tokenizer
from .train_config import TrainConfig, changed_settings
from .trainer import StochasticTrainer


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: optimizer steps done.
        stopped_by: the signal that ended it early, None where it is finished.
        resumed_from: the step that it went on from, 0 for a new run.
    """

    step: int
    stopped_by: signal.Signals | None
    resumed_from: int


def train(
    config: TrainConfig, output: Path, *, command: str, resume: bool = True, cache: Path | None = None
) -> Outcome:
    """Train, from the newest checkpoint in `output` where there is one.

    Args:
        config: the run.
        output: folder for all that is written. Processes on several hosts must share it.
        command: the command line, for the record.
        resume: False demands an output without a run in it.
        cache: folder for tokens and a learned tokenizer, by default in `output`; runs on the same text may share it.

    Raises:
        ValueError: a setting is wrong, or `output` holds a run of other settings or on other data.
        DataExhausted: there is less data than the steps need.
        NotFiniteError: a loss or gradient is NaN or infinite; what is needed to look at it is kept.
        DiskFullError: a checkpoint found no room.
    """
    training = config.training
    checkpoint_folder = output / "checkpoints"
    arguments = training_arguments(training, checkpoint_folder)
    is_first = arguments.process_index == 0
    cache = cache or output / "data"
    _check_output(config, output, resume)
    if _is_finished(output, training.total_steps):
        return Outcome(training.total_steps, None, training.total_steps)
    if arguments.world_size > 1:  # before one process writes what another would find
        dist.barrier()
    tokenizer = make_tokenizer(config.tokenizer, config.data, cache_dir=cache)
    model_config = make_model_config(config, tokenizer)
    data = open_data(
        config.data,
        tokenizer=tokenizer,
        sequence_length=training.sequence_length,
        seed=training.seed,
        cache_dir=cache,
    )
    data.train.require(training.total_steps * training.rows)
    checkpoint = newest_checkpoint(checkpoint_folder)
    begun = 0 if checkpoint is None else step_of(checkpoint)
    if checkpoint is not None:
        _check_data(data, output)

    set_seed(training.seed)
    model = AutoModelForCausalLM.from_config(model_config)
    keys = attended_keys(model_config, training.sequence_length)
    token_flops = flops_per_token(model, keys)
    peak = device_peak(arguments.device, training.precision, training.peak_flops)
    log = RunLog(output, training, token_flops=token_flops, peak_flops=peak.flops * arguments.world_size)
    with StopSignals() as signals:
        stop = StopOnSignal(signals)
        trainer = StochasticTrainer(
            data=data,
            training=training,
            folder=checkpoint_folder,
            model=model,
            args=arguments,
            eval_dataset=data.validation,
            processing_class=tokenizer,
            # A model without routing keys has no step to set.
            callbacks=[*([RoutingStep()] if model.config._attn_implementation == NAME else []), stop, log],
        )
        trainer.remove_callback(PrinterCallback)
        if training.parallel == "fsdp2" and not trainer.is_fsdp_enabled:
            raise ValueError(
                f"training.parallel 'fsdp2' needs accelerators, as nothing is sharded on {arguments.device}; use 'ddp'"
            )
        model.config.use_cache = True  # for who loads it; the Trainer turns it off, and batches ask for none
        trainer.resume_from(checkpoint, begun)
        if is_first:  # nothing before this point leaves a run behind
            clear_unfinished(checkpoint_folder)
            write_text(output / "data.json", json.dumps(data.facts, indent=1) + "\n")
            write_text(output / "config.yaml", yaml.safe_dump(config.plain(), sort_keys=False))
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except NotFiniteError as error:
            raise NotFiniteError(_explain(error, trainer, output)) from None
        finally:
            log.close()
        if stop.stopped_by is not None:
            return Outcome(trainer.state.global_step, signal.Signals(stop.stopped_by), begun)
        _save_model(trainer, output / "model")
    if is_first:
        clear_unfinished(checkpoint_folder)
        results = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": training.total_steps,
            "tokens": training.total_steps * training.step_tokens,
            "processes": arguments.world_size,
            "data": data.facts,
            "keys_per_token_and_layer": [round(count, 2) for count in keys],
            "flops_per_token": token_flops,
            "peak_flops_per_device": peak.flops,
            "peak_flops_source": peak.source,
            "last": (log.losses.entries() or [None])[-1],
            "validation": log.validations.entries(),
        }
        Record(command, config.plain(), Environment.current(), results).save(output / "record.json")
    return Outcome(training.total_steps, None, begun)


def _check_output(config: TrainConfig, output: Path, resume: bool) -> None:
    kept = output / "config.yaml"
    if not kept.exists():
        output.mkdir(parents=True, exist_ok=True)
        return
    if not resume:
        raise ValueError(f"output {output} holds a run, which --no-resume must not touch; choose another output")
    changed = changed_settings(yaml.safe_load(kept.read_text(encoding="utf-8")), config.plain())
    if changed:
        raise ValueError(
            f"output {output} holds a run of another configuration ({'; '.join(changed)}); choose another output"
        )


def _check_data(data: Data, output: Path) -> None:
    """The settings name a text or a set, which may have changed since; of a stream nothing is known to compare."""
    kept = output / "data.json"
    was = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else data.facts
    for name, before, now in (
        ("data", was, data.facts),
        ("data.validation", was["validation"], data.facts["validation"]),
    ):
        if (before or {}).get("sha256") != (now or {}).get("sha256"):
            raise ValueError(
                f"output {output} holds a run whose {name} was of other tokens: {before['source']} or the tokenizer "
                "has changed since; choose another output"
            )


def _is_finished(output: Path, steps: int) -> bool:
    record = output / "record.json"
    return record.exists() and Record.load(record).results["steps"] == steps


def _save_model(trainer: StochasticTrainer, folder: Path) -> None:
    """Model and tokenizer in Hugging Face form, whole or not at all."""
    aside = folder.with_name(f".{folder.name}")
    needed = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())  # type: ignore[union-attr]
    with telling_of_a_full_disk("the model", trainer.folder, needed):
        trainer.save_model(str(aside))
    if trainer.args.should_save:
        (aside / "training_args.bin").unlink()  # a pickle, and of no use to who loads the model
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)


def _explain(error: NotFiniteError, trainer: StochasticTrainer, output: Path) -> str:
    """Keep the step's rows beside the run, and say how to get there again."""
    step, training = trainer.state.global_step - 1, trainer.training
    assert trainer.batches is not None
    rows = trainer.batches.rows
    folder = output / f"not-finite-{step + 1}"
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    save_file(tensors, folder / f"rows-of-process-{trainer.args.process_index}.safetensors")
    newest = newest_checkpoint(output / "checkpoints")
    places = [step * training.rows, (step + 1) * training.rows]
    if trainer.args.process_index == 0:
        facts = {"what": str(error), "rows_of_training_data": places, "resume_from": newest and newest.name}
        write_text(folder / "facts.json", json.dumps(facts, indent=1) + "\n")
    return (
        f"{error}, on rows {places[0]} to {places[1] - 1} of the data, kept in {folder}. The newest checkpoint "
        f"is {newest or 'none, as the run did not get so far'}; resuming meets the same step again, bit for bit"
    )
