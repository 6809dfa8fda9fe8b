"""The tokenizer of a training run: one that exists, or a byte-level BPE learned from the training text."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..ops.validation import check_count
from .data import DataConfig, training_pieces
from .text import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
# The bytes, and the three above.
_SMALLEST = 256 + 3


@dataclass(frozen=True)
class LearnedTokenizer:
    """How a tokenizer is learned.

    Attributes:
        vocab_size: tokens, special ones among them; fewer where the text has no more pairs to merge.
        min_frequency: of a pair that is merged.
        characters: of the training text, from its beginning, at most.
    """

    vocab_size: int = 8192
    min_frequency: int = 2
    characters: int = 200_000_000

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_count("tokenizer.train.vocab_size", self.vocab_size, minimum=_SMALLEST)
        check_count("tokenizer.train.min_frequency", self.min_frequency, minimum=1)
        check_count("tokenizer.train.characters", self.characters, minimum=1)


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer that exists, or one to learn.

    Attributes:
        name: a hub name or a folder.
        train: a `LearnedTokenizer`, or a mapping of its fields.
    """

    name: str | None = None
    train: LearnedTokenizer | None = None

    def __post_init__(self) -> None:
        """Check that it is one of the two."""
        if isinstance(self.train, Mapping):
            known = [field.name for field in fields(LearnedTokenizer)]
            unknown = [key for key in self.train if key not in known]
            if unknown:
                raise ValueError(f"tokenizer.train may have {', '.join(known)}, got {', '.join(map(str, unknown))}")
            object.__setattr__(self, "train", LearnedTokenizer(**self.train))
        if self.train is not None and not isinstance(self.train, LearnedTokenizer):
            raise ValueError(f"tokenizer.train must be a mapping, got {self.train!r}")
        if (self.name is None) == (self.train is None):
            raise ValueError(
                "tokenizer must have either name or train, got " + ("neither" if self.name is None else "both")
            )
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise ValueError(f"tokenizer.name must be a hub name or a folder, got {self.name!r}")


def make_tokenizer(config: TokenizerConfig, data: DataConfig, *, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or learn it from the training text; a learned one is kept in `cache_dir`.

    A learned tokenizer turns any text into tokens and back without loss, puts its beginning-of-sequence token before a
    text, and is the same for the same text on every machine.

    Raises:
        ValueError: there is no such tokenizer, or no text to learn from.
    """
    from transformers import AutoTokenizer

    if config.train is None:
        assert config.name is not None
        path = Path(config.name).expanduser()
        is_local = path.is_dir()
        try:
            return AutoTokenizer.from_pretrained(
                str(path) if is_local else config.name, local_files_only=is_local, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            told = " ".join(str(error).split())
            raise ValueError(
                f"tokenizer.name must be a hub name or a folder with a tokenizer, got {config.name!r}: {told}"
            ) from error
    text = digest(data.text_paths) if data.dataset is None else repr(data.dataset)
    key = hashlib.sha256(json.dumps([text, asdict(config.train)]).encode()).hexdigest()[:16]
    folder = cache_dir / f"tokenizer-{key}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f".{folder.name}.lock"):
        if not folder.is_dir():
            aside = cache_dir / f".{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            learn((piece for piece, _ in training_pieces(data)), config.train).save_pretrained(aside)
            aside.rename(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def learn(texts: Iterator[str], how: LearnedTokenizer) -> PreTrainedTokenizerBase:
    """A byte-level BPE (GPT-2's splitting into words) of `texts`. ValueError where they hold nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    read = 0

    def counted(text: str) -> bool:
        nonlocal read
        is_wanted = read < how.characters
        read += len(text)
        return is_wanted

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=how.vocab_size,
        min_frequency=how.min_frequency,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(takewhile(counted, texts), trainer)
    if not read:
        raise ValueError("data must hold text for a tokenizer to learn from, got none")
    begin = bpe.token_to_id(BEGIN)
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
            ),
        ]
    )
    options: dict[str, Any] = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **options)
