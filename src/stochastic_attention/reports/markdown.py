"""The Markdown that this package writes, as HTML: headings, lists, tables, fenced and indented text, paragraphs.

A link is its text and, in brackets, where it led: a page that stands alone has no files beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .markup import inline, preformatted, table, wrap

_RULE = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?")
_HEADING = re.compile(r"(#{1,6})\s+(.*)")
_FENCE = re.compile(r"`{3,}")
_INDENT = "    "
_CODE_OR_LINK = re.compile(r"`[^`]+`|!?\[([^\]]+)\]\(([^()\s]+)\)")


def to_html(text: str, *, label: str, top: int = 4) -> str:
    """Convert.

    Args:
        text: Markdown. What is none of the kinds above is a paragraph.
        label: of its tables, for screen readers.
        top: level of the highest headings.
    """
    lines = text.split("\n")  # and at nothing else, for the sake of text between fences
    levels = [len(found[1]) for line in lines if (found := _HEADING.match(line))]
    shift = top - min(levels, default=1)
    pieces, at = [], 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif fence := _FENCE.match(line):
            end = _run(lines, at + 1, lambda line, fence=fence[0]: not line.startswith(fence))
            pieces.append(preformatted("\n".join(lines[at + 1 : end]), label=label))
            at = end + 1
        elif line.startswith(_INDENT):
            end = _run(lines, at + 1, lambda line: line.startswith(_INDENT))
            text = "\n".join(line.removeprefix(_INDENT) for line in lines[at:end])
            pieces.append(preformatted(text, label=label))
            at = end
        elif found := _HEADING.match(line):
            pieces.append(wrap(f"h{min(6, len(found[1]) + shift)}", _inline(found[2])))
            at += 1
        elif at + 1 < len(lines) and "|" in line and _RULE.fullmatch(lines[at + 1].strip()):
            end = _run(lines, at + 2, lambda line: "|" in line)
            pieces.append(_table(lines[at:end], label))
            at = end
        elif line.startswith("- "):
            end = _run(lines, at + 1, lambda line: line.startswith(("- ", "  ")))
            items = re.split(r"^- ", "\n".join(lines[at:end]), flags=re.MULTILINE)[1:]
            pieces.append(wrap("ul", "\n".join(wrap("li", _inline(item.strip())) for item in items)))
            at = end
        else:
            end = _run(lines, at + 1, lambda line: bool(line.strip()) and not line.startswith(("- ", "#", "|", "```")))
            pieces.append(wrap("p", _inline("\n".join(lines[at:end]))))
            at = end
    return "\n".join(pieces)


def fenced(text: str) -> str:
    """Text that `to_html` leaves as it is, whatever it holds."""
    longest = max(map(len, _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _inline(text: str) -> str:
    return inline(_unlinked(text))


def _unlinked(text: str) -> str:
    return _CODE_OR_LINK.sub(lambda found: f"{found[1]} ({found[2]})" if found[1] else found[0], text)


def _run(lines: Sequence[str], start: int, belongs: Callable[[str], bool]) -> int:
    """Where the lines from `start` that belong to one piece end."""
    return next((i for i in range(start, len(lines)) if not belongs(lines[i])), len(lines))


def _table(lines: Sequence[str], label: str) -> str:
    header, rule, *rows = [_cells(line) for line in lines]
    return table(header, rows, label=label, is_number=[cell.endswith(":") for cell in rule])


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|")
    inside = inside[:-1] if inside.endswith("|") and not inside.endswith("\\|") else inside
    return [_unlinked(cell.strip().replace("\\|", "|")) for cell in re.split(r"(?<!\\)\|", inside)]
