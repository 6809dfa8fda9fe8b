"""Pieces of HTML. Every text that comes in is escaped here, and nowhere else."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Cells = Sequence[str]
_LONG = 40  # rows, above which a table is folded
_SHORT = 40  # characters of a word that a narrow screen can hold


def element(tag: str, text: str, **attributes: str) -> str:
    """An element around plain text. Attributes as in Python: `class_`, `aria_label`."""
    return wrap(tag, escape(text), **attributes)


def wrap(tag: str, html: str, **attributes: str) -> str:
    """An element around HTML."""
    said = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return f"<{tag}{said}>{html}</{tag}>"


def inline(text: str) -> str:
    """Text in which `code`, **bold** and *emphasis* mean what they do in Markdown."""
    pieces = re.split(r"`([^`]+)`", text)
    return "".join(element("code", piece) if at % 2 else _stressed(piece) for at, piece in enumerate(pieces))


def _stressed(text: str) -> str:
    html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"(?<!\S)\*(\S[^*<]*)(?<!\s)\*(?!\w)", r"<em>\1</em>", html)


def table(header: Cells, rows: Sequence[Cells], *, label: str, is_number: Sequence[bool] | None = None) -> str:
    """A table that scrolls by itself, folded where it is long; the first column names its row.

    Args:
        header, rows: cells; a row may be shorter or longer than the header.
        label: what it shows, read aloud by screen readers.
        is_number: by column, whether it is aligned on the right; by default where every cell is a number.
    """
    width = max(map(len, [header, *rows]))
    lines = [[*row, *[""] * (width - len(row))] for row in (header, *rows)]
    if is_number is None:
        is_number = [all(_is_number(line[column]) for line in lines[1:]) for column in range(width)]
    classes = [' class="n"' if right else "" for right in [*is_number, *[False] * width][:width]]

    def cells(line: Cells, openings: Sequence[str]) -> str:
        return "<tr>" + "".join(
            f"<{opening}{said}>{inline(cell)}</{opening[:2]}>"
            for opening, said, cell in zip(openings, classes, line, strict=True)
        ) + "</tr>\n"  # fmt: skip

    head = cells(lines[0], ['th scope="col"'] * width)
    body = "".join(cells(line, ['th scope="row"', *["td"] * (width - 1)]) for line in lines[1:])
    html = f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}</tbody>\n</table>"
    html = wrap("div", html, class_="scroll", role="region", tabindex="0", aria_label=label)
    return folded(f"Table of {len(rows)} rows", html) if len(rows) > _LONG else html


def _is_number(cell: str) -> bool:
    return not cell or re.match(r"[-+]?\.?\d", cell) is not None


def definitions(facts: Mapping[str, Any]) -> str:
    """Names and plain values."""
    return wrap("dl", "".join(element("dt", name) + element("dd", value_text(value)) for name, value in facts.items()))


def value_text(value: Any) -> str:  # noqa: ANN401  # plain data
    """A plain value on a line, exactly; nested ones as JSON."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(item, (str, int)) for item in value):
        return ", ".join(map(value_text, value))
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def folded(summary: str, html: str) -> str:
    """Details that are closed at first."""
    return wrap("details", element("summary", summary) + html)


def preformatted(text: str, *, label: str, **attributes: str) -> str:
    """Text as it is, which scrolls by itself."""
    return element("pre", text, tabindex="0", role="region", aria_label=label, **attributes)


def command_line(text: str) -> str:
    """A command as it is, which wraps, but not at the hyphens of a short word."""
    words = [element("span", word) if len(word) <= _SHORT else escape(word) for word in text.split(" ")]
    return wrap("pre", wrap("code", " ".join(words)), class_="command")


def image(png: bytes, *, alt: str) -> str:
    """A PNG inside the page; ValueError where it is none."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR" or len(png) < 24:
        raise ValueError("is not a PNG image")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    source = f"data:image/png;base64,{b64encode(png).decode('ascii')}"
    return f'<img src="{source}" width="{width}" height="{height}" alt="{escape(alt)}">'
