"""Every table: Markdown, aligned so that it reads on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of `rows`, the header first, all of one length. Ends with a newline."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    # At least 2: a rule needs a dash beside its colon, or all of it is no table.
    widths = [max(2, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    # The first column, a name, reads from the left; figures line up on the right.
    pad = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    text = ["| " + " | ".join(p(x, w) for p, x, w in zip(pad, row, widths, strict=True)) + " |" for row in rows]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([text[0], "| " + " | ".join(rule) + " |", *text[1:]]) + "\n"
