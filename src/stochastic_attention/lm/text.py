"""Text files, document by document: UTF-8, plain or gzipped, a line of its own with U+001E between documents."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

# A line of its own with this character ends a document.
SEPARATOR = "\x1e"
# The text that comes with the package, see data/README.md there.
EMBEDDED = "embedded"
# Characters after which a long document is cut, at the next line end, to be read and tokenised in bounded memory.
_PIECE = 1 << 16


def text_path(name: str) -> Path:
    """The file that a setting names: a path, or "embedded"."""
    if name == EMBEDDED:
        return Path(__file__).parent.parent / "data" / "novels.txt.gz"
    return Path(name).expanduser()


def pieces(path: Path, size: int = _PIECE) -> Iterator[tuple[str, bool]]:
    r"""The text in order, as (piece, whether it ends its document).

    A document is one piece, unless it has more than `size` characters. A line end "\r\n" becomes "\n". Documents of
    nothing but white space, such as the one after a last separator, are left out.

    Raises:
        ValueError: the file is not UTF-8, and says at which line; or a .gz file is damaged.
    """
    lines: list[str] = []
    held, is_first = 0, True
    for line in _lines(path):
        if line.rstrip("\n") == SEPARATOR:
            yield from _last(lines, is_first)
            lines, held, is_first = [], 0, True
            continue
        if held >= size:
            yield "".join(lines), False
            lines, held, is_first = [], 0, False
        lines.append(line)
        held += len(line)
    yield from _last(lines, is_first)


def documents(path: Path) -> Iterator[str]:
    """The documents in order, each whole. ValueError as in `pieces`."""
    parts: list[str] = []
    for piece, is_last in pieces(path):
        parts.append(piece)
        if is_last:
            yield "".join(parts)
            parts = []


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the files' contents, in order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def size_in_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of text in the files; None where one is compressed, which would have to be read to tell."""
    paths = list(paths)
    return None if any(_is_gzip(path) for path in paths) else sum(path.stat().st_size for path in paths)


def _last(lines: list[str], is_first: bool) -> Iterator[tuple[str, bool]]:
    text = "".join(lines)
    if not is_first or text.strip():
        yield text, True


def _is_gzip(path: Path) -> bool:
    return path.suffix == ".gz"


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rb") if _is_gzip(path) else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield _decoded(line, number, path)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"text must be a whole gzip file where its name ends in .gz, got {path}: {error}"
            ) from error


def _decoded(line: bytes, number: int, path: Path) -> str:
    try:
        # Editors of Windows begin a file with a mark, which is no text.
        return line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8, got byte 0x{error.object[error.start]:02x} in line {number} of {path}"
        ) from error
