"""Tokens of a text on disk, made once: documents back to back in one memory-mapped array, and where each ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from ..records import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of every key: a change of what the files mean must not read old ones.
_FORMAT = 3
# Characters that are tokenised in one call; a fast tokenizer works on the pieces of a call in parallel.
_CALL = 1 << 20


@dataclass(frozen=True)
class TokenFile:
    """A folder with tokens.bin, ends.npy and meta.json. Pickles as its path, so that worker processes may open it.

    Attributes:
        folder: where it lies. Finished folders never change.
    """

    folder: Path

    @cached_property
    def tokens(self) -> np.ndarray:
        """uint16 or uint32 [tokens], mapped."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.facts["dtype"], mode="r")

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [documents], mapped: the index after each document's last token."""
        return np.load(self.folder / "ends.npy", mmap_mode="r")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What was tokenised: source, key, dtype, tokens, documents, and SHA-256 of the tokens and ends."""
        return json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token. `len(tokenizer)` is how many there are, which is less where ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


class Encoder:
    """A tokenizer, and the rule by which documents become tokens.

    A document is its tokens and then the tokenizer's end-of-sequence token; the beginning-of-sequence token comes first
    where the tokenizer itself puts it before a text. Text that reads like a special token is plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """ValueError where the tokenizer has no end-of-sequence token."""
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ValueError("tokenizer must have an end-of-sequence token, which ends each document, got one without")
        self._tokenizer = tokenizer
        self.end = end
        begin: Any = tokenizer.bos_token_id
        dressed: Any = tokenizer("a")["input_ids"]
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.begin: list[int] = [begin] if dressed != plain and dressed[0] == begin else []

    @cached_property
    def dtype(self) -> str:
        """Little-endian unsigned integers, the smallest that hold every token."""
        return "<u2" if vocabulary_size(self._tokenizer) <= 1 << 16 else "<u4"

    @property
    def digest(self) -> str:
        """Of all that decides which tokens a text becomes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else sorted(self._tokenizer.get_vocab().items())
        if isinstance(rules, dict):  # the last call's padding and truncation stay behind in it
            rules = {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
        facts = [type(self._tokenizer).__name__, rules, self.begin, self.end]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def encode(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[int], bool, int]]:
        """(tokens, whether they end their document, bytes of UTF-8) of each (text, whether it ends its document)."""
        is_first = True
        for call in _calls(pieces):
            texts = [text for text, _ in call]
            encoded = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
            rows: list[list[int]] = encoded["input_ids"]  # type: ignore[assignment]
            for (text, is_last), tokens in zip(call, rows, strict=True):
                begin = self.begin if is_first else []
                end = [self.end] if is_last else []
                yield begin + tokens + end, is_last, len(text.encode())
                is_first = is_last


def token_file(
    pieces: Iterable[tuple[str, bool]], encoder: Encoder, *, key: str, source: str, size: int | None, cache_dir: Path
) -> TokenFile:
    """The tokens of `pieces`, read from `cache_dir` where they are there already.

    Made aside and renamed whole, by one process at a time: what a kill leaves behind is cleared away by the next call.

    Args:
        pieces: (text, whether it ends its document), in order.
        encoder: makes tokens of them.
        key: stands for the text: two texts that differ have different keys.
        source: the text in words, for the progress bar and for errors.
        size: bytes of the text, None where unknown.
        cache_dir: where folders of tokens are kept.

    Raises:
        ValueError: what is there has lost a part, as in a copy that was cut short.
        OSError: the disk is full; says what is needed and what is free.
    """
    name = hashlib.sha256(f"{_FORMAT} {key} {encoder.digest}".encode()).hexdigest()[:16]
    folder = cache_dir / f"tokens-{name}"
    if folder.is_dir():
        return _whole(TokenFile(folder))
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f".tokens-{name}.lock"):
        if not folder.is_dir():
            aside = cache_dir / f".tokens-{name}"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                _write(aside, pieces, encoder, key, source, size)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return TokenFile(folder)


def _whole(file: TokenFile) -> TokenFile:
    try:
        facts, size = file.facts, (file.folder / "tokens.bin").stat().st_size
        is_whole = size == facts["tokens"] * np.dtype(facts["dtype"]).itemsize and len(file.ends) == facts["documents"]
    except (OSError, EOFError, ValueError, LookupError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"tokens in {file.folder} are not whole: remove the folder, and they are made anew")
    return file


def _write(
    folder: Path, pieces: Iterable[tuple[str, bool]], encoder: Encoder, key: str, source: str, size: int | None
) -> None:
    ends: list[int] = []
    count = read = 0
    digest = hashlib.sha256()
    with (
        (folder / "tokens.bin").open("wb") as file,
        tqdm(total=size, desc=f"tokenising {source}", unit="B", unit_scale=True, dynamic_ncols=True) as bar,
    ):
        for tokens, is_last, length in encoder.encode(pieces):
            raw = np.asarray(tokens, dtype=encoder.dtype).tobytes()
            rest = length if size is None else max(size - read, length)
            read += length
            _append(file, raw, source, needed=len(raw) * rest // length)
            digest.update(raw)
            count += len(tokens)
            if is_last:
                ends.append(count)
            bar.update(length)
    array = np.asarray(ends, dtype="<i8")
    np.save(folder / "ends.npy", array)
    digest.update(array.tobytes())
    facts = {"source": source, "key": key, "dtype": encoder.dtype, "tokens": count, "documents": len(ends)}
    facts["sha256"] = digest.hexdigest()
    write_text(folder / "meta.json", json.dumps(facts, indent=1) + "\n")


def _append(file: BinaryIO, raw: bytes, source: str, needed: int) -> None:
    """Write, or say how many more bytes would about be needed at this rate."""
    try:
        file.write(raw)
        file.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        folder = os.path.dirname(file.name)
        free = shutil.disk_usage(folder).free
        raise OSError(
            errno.ENOSPC,
            f"no room for the tokens of {source}: about {needed} bytes more are needed, {free} are free",
            folder,
        ) from error


def _calls(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    call: list[tuple[str, bool]] = []
    held = 0
    for piece in pieces:
        call.append(piece)
        held += len(piece[0])
        if held >= _CALL:
            yield call
            call, held = [], 0
    if call:
        yield call
