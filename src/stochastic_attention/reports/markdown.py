"""The Markdown that this package writes, as HTML: headings, lists, tables, fenced text, paragraphs; no links."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .markup import inline, preformatted, table, wrap

_RULE = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?")
_HEADING = re.compile(r"(#{1,6})\s+(.*)")


def to_html(text: str, *, label: str, top: int = 4) -> str:
    """Convert.

    Args:
        text: Markdown. What is none of the kinds above is a paragraph.
        label: of its tables, for screen readers.
        top: level of the highest headings.
    """
    lines = text.splitlines()
    levels = [len(found[1]) for line in lines if (found := _HEADING.match(line))]
    shift = top - min(levels, default=1)
    pieces, at = [], 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif line.startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("```")), len(lines))
            pieces.append(preformatted("\n".join(lines[at + 1 : end]), label=label))
            at = end + 1
        elif found := _HEADING.match(line):
            pieces.append(wrap(f"h{min(6, len(found[1]) + shift)}", inline(found[2])))
            at += 1
        elif at + 1 < len(lines) and "|" in line and _RULE.fullmatch(lines[at + 1].strip()):
            end = _run(lines, at + 2, lambda line: "|" in line)
            pieces.append(_table(lines[at:end], label))
            at = end
        elif line.startswith("- "):
            end = _run(lines, at + 1, lambda line: line.startswith(("- ", "  ")))
            items = re.split(r"^- ", "\n".join(lines[at:end]), flags=re.MULTILINE)[1:]
            pieces.append(wrap("ul", "\n".join(wrap("li", inline(item.strip())) for item in items)))
            at = end
        else:
            end = _run(lines, at + 1, lambda line: bool(line.strip()) and not line.startswith(("- ", "#", "|", "```")))
            pieces.append(wrap("p", inline("\n".join(lines[at:end]))))
            at = end
    return "\n".join(pieces)


def _run(lines: Sequence[str], start: int, belongs: Callable[[str], bool]) -> int:
    """Where the lines from `start` that belong to one piece end."""
    return next((i for i in range(start, len(lines)) if not belongs(lines[i])), len(lines))


def _table(lines: Sequence[str], label: str) -> str:
    header, rule, *rows = [_cells(line) for line in lines]
    return table(header, rows, label=label, is_number=[cell.endswith(":") for cell in rule])


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|")
    inside = inside[:-1] if inside.endswith("|") and not inside.endswith("\\|") else inside
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]
