"""From a run's configuration to what transformers takes: the model's configuration, and the Trainer's arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, TrainingArguments

from ..hf.state import FAMILIES
from ..ops.validation import check_count
from .checkpoints import unfinished
from .config import StochasticLlamaConfig
from .token_file import vocabulary_size
from .train_config import TrainConfig, TrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Their attention keeps packed documents apart by positions. gpt-oss makes its masks without them.
_ISOLATING = (*(family for family in FAMILIES if family != "gpt_oss"), StochasticLlamaConfig.model_type)

# Renamed inside the range of supported versions.
_CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


def training_arguments(training: TrainingConfig, checkpoints: Path) -> TrainingArguments:
    """The Trainer's arguments; joins the processes that torchrun started. ValueError where the launch is another."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if training.parallel == "none" and processes > 1:
        raise ValueError(f"training.parallel must be 'ddp' or 'fsdp2' with {processes} processes, got 'none'")
    if training.parallel == "fsdp2" and "WORLD_SIZE" not in os.environ:
        raise ValueError("training.parallel 'fsdp2' must be launched by torchrun, also for one process, got none")
    if training.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device must be one that torch has here, got 'cuda'")
    micro, accumulation = training.micro_batches(processes)
    use_cpu = training.device == "cpu" or not torch.accelerator.is_available()
    if not use_cpu and torch.accelerator.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"{torch.accelerator.device_count()} devices are visible to one process: launch one a device by torchrun, "
            "or show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}} if training.parallel == "fsdp2" else {}
    return TrainingArguments(
        output_dir=str(unfinished(checkpoints)),
        max_steps=training.total_steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": training.min_learning_rate},
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        max_grad_norm=training.clip or 0.0,
        bf16=training.precision == "bf16",
        **({_CHECKPOINTING: True} if training.gradient_checkpointing else {}),
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would hide what must stop the run
        save_strategy="steps",
        save_steps=training.save_every,
        eval_strategy="no" if training.eval_every is None else "steps",
        eval_steps=training.eval_every,
        ignore_data_skip=True,  # the order of the data begins at the step resumed from by itself
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if use_cpu and processes > 1 else None,
        use_cpu=use_cpu,
        torch_compile=training.torch_compile,
        seed=training.seed,
        report_to="none",
        disable_tqdm=True,
        **sharded,
    )


def make_model_config(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of the model to train, with what the tokenizer and the rows decide where it is not said.

    Raises:
        ValueError: a field that the model type does not have, or a value that it refuses.
    """
    model, model_type = config.model, config.model.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"model.model_type must be a model type that transformers knows, got {model_type!r}")
    if config.data.documents == "isolated" and model_type not in _ISOLATING:
        raise ValueError(
            f"data.documents must be 'joined' with a {model_type}, which may not keep packed documents apart by "
            "their positions, got 'isolated'"
        )
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | kind.attribute_map.keys()  # which has the names that some published files say
    for key in model:
        if key not in known:
            raise ValueError(f"model.{key} is no field of a {model_type}; it has {', '.join(sorted(known))}")
    filled = {
        "vocab_size": vocabulary_size(tokenizer),
        "max_position_embeddings": config.training.sequence_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    fields = filled | {key: value for key, value in model.items() if key != "model_type"}
    for key in ("vocab_size", "max_position_embeddings"):
        check_count(f"model.{key}", fields[key], minimum=filled[key])
    if fields["pad_token_id"] is not None:
        check_count("model.pad_token_id", fields["pad_token_id"], minimum=0, maximum=fields["vocab_size"] - 1)
    try:
        return kind(**fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from None
