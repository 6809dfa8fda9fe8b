"""Tasks on long text: facts buried in it, and what it repeats by itself."""

import math
import re
from functools import cache

import pytest

from stochastic_attention.evaluation.copies import copy_distances
from stochastic_attention.evaluation.requests import Item, Request, Score, Span
from stochastic_attention.evaluation.tasks import TASKS, TaskOptions
from stochastic_attention.evaluation.tasks.base import encode, encode_parts
from stochastic_attention.evaluation.tasks.haystack import Draw, bury
from stochastic_attention.evaluation.tasks.spans import accuracy, exactness, perplexities

SENTENCE = "the old house stood by river and nobody knew who had built it or why its door was never shut"
BURIED = ("needle", "multi-needle", "passkey", "variable-tracking", "associative-recall")
LENGTH = 2400  # bytes: the tokenizer knows nothing else
LIMIT = 8


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    words = SENTENCE.split()
    sentences = [
        " ".join(words[(5 * index + 7 * place) % len(words)] for place in range(4 + index % 9)).capitalize() + "."
        for index in range(400)
    ]
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(" ".join(sentences[:200]) + "\n\x1e\n" + " ".join(sentences[200:]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def options(long_text):
    return TaskOptions(length=LENGTH, text=long_text)


@pytest.fixture(scope="module")
def items_of(tokenizer, options):
    return cache(lambda name: TASKS[name].items(tokenizer, options, LIMIT))


def decoded(tokenizer, tokens):
    return tokenizer.decode(list(tokens))


def asked(tokenizer, item):
    """The text before the answers, and each graded answer with where it begins and ends in the text."""
    request = item.requests[item.answer]
    text = decoded(tokenizer, request.tokens)
    first = len(text) - request.scored
    return text[:first], [(text[first + s.start : first + s.stop], first + s.start) for s in item.spans]


@pytest.mark.parametrize("name", BURIED)
def test_text_without_spaces_is_cut_between_sentences(tokenizer, tmp_path, name):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"那座老房子在河边{'又' * (index % 5)}立着。" for index in range(400)), encoding="utf-8")
    items = TASKS[name].items(tokenizer, TaskOptions(length=LENGTH, text=path), 2)
    for item in items:
        longest = max(len(request.tokens) for request in item.requests)
        assert LENGTH - 60 <= longest <= LENGTH  # a character is three bytes
    context, _ = asked(tokenizer, items[1])  # the first one's fact may begin the text
    assert re.search(r"。(The|VAR) .*\. 那", context)


@pytest.mark.parametrize("name", BURIED)
class TestBuried:
    def test_items_have_the_length_asked_for_and_are_always_the_same(self, tokenizer, options, items_of, name):
        items = items_of(name)
        assert items == TASKS[name].items(tokenizer, options, LIMIT)
        assert len({item.requests for item in items}) == LIMIT
        for item in items:
            longest = max(len(request.tokens) for request in item.requests)
            assert LENGTH - 8 <= longest <= LENGTH

    def test_an_answer_stands_once_in_the_text_after_its_cue(self, tokenizer, items_of, name):
        for item in items_of(name):
            context, answers = asked(tokenizer, item)
            haystack = context.rpartition("\n\n")[0]
            for answer, _ in answers:
                word = answer.strip()
                assert haystack.count(word) == 1
                assert word.isalnum()
                assert re.search(rf"(owns a|pass key is|=) {word}\.", haystack)

    def test_scored_tokens_are_the_answers_to_the_byte(self, tokenizer, items_of, name):
        for item in items_of(name):
            for request in item.requests:
                scored = decoded(tokenizer, request.tokens[-request.scored :])
                assert scored.startswith(" ")
                if len(item.spans) == 1:
                    assert scored.strip().isalnum()
            for answer, begin in asked(tokenizer, item)[1]:
                text = decoded(tokenizer, item.requests[item.answer].tokens)
                cue = text[:begin].rpartition("\n\n")[2]
                assert cue.endswith((" a", " is"))
                assert answer.startswith(" ")
                if cue.endswith(" a") or cue == "The pass key is":
                    assert f"{cue}{answer}." in text[: text.index("\n\n" + cue)]

    def test_alternatives_differ_in_the_answer_alone(self, tokenizer, items_of, name):
        for item in items_of(name):
            contexts = {request.tokens[: -request.scored] for request in item.requests}
            answers = [decoded(tokenizer, request.tokens[-request.scored :]) for request in item.requests]
            assert len(contexts) == 1
            assert len(set(answers)) == len(item.requests) == (1 if len(item.spans) > 1 or name == "passkey" else 4)

    def test_without_the_facts_the_text_is_the_files(self, tokenizer, items_of, name, long_text):
        everything = " ".join(long_text.read_text(encoding="utf-8").replace("\x1e", " ").split())
        for item in items_of(name):
            haystack = asked(tokenizer, item)[0].rpartition("\n\n")[0]
            bare = re.sub(
                r"The \w+ from \w+ owns a \w+\. |The pass key is \d+\. Remember it\. |VAR [^.]*\. ", "", haystack
            )
            assert " ".join(bare.split()) in everything + " " + everything

    def test_groups_of_the_answers_are_reported(self, items_of, name):
        task = TASKS[name]
        items = items_of(name)
        scores = [[Score((-1.0,) * r.scored, (True,) * r.scored) for r in item.requests] for item in items]
        metrics = task.metrics(items, scores)
        assert metrics["exact"].value == 1.0
        assert metrics["perplexity"].value == pytest.approx(math.e)
        assert task.headline in metrics
        groups = {span.group for item in items for span in item.spans}
        assert {key.partition("@")[2] for key in metrics} == {"", *groups}
        assert sum(metrics[f"exact@{group}"].n for group in groups) >= LIMIT

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"length": 100_000}, "text must hold 100000 tokens"),
            ({"length": 40}, "length must leave half of its tokens"),
        ],
        ids=["more than the text", "less than the facts"],
    )
    def test_lengths_that_cannot_be_are_refused(self, tokenizer, long_text, name, change, told):
        with pytest.raises(ValueError, match=told):
            TASKS[name].items(tokenizer, TaskOptions(text=long_text, **change), 2)


def test_needles_lie_at_their_depths(tokenizer, items_of):
    for name in ("needle", "multi-needle", "passkey", "associative-recall"):
        for item in items_of(name):
            context, answers = asked(tokenizer, item)
            haystack = context.rpartition("\n\n")[0]
            for (answer, _), span in zip(answers, item.spans, strict=True):
                low, _, high = span.group.removeprefix("depth=").partition("-")
                depth = haystack.index(answer.strip()) / len(haystack)
                assert float(low) - 0.1 <= depth <= float(high or low) + 0.1


def test_a_chain_of_variables_leads_to_its_value_in_as_many_hops_as_told(tokenizer, items_of):
    items = items_of("variable-tracking")
    for item in items:
        context, ((answer, _),) = asked(tokenizer, item)
        assigned = dict(re.findall(r"VAR (\w+) = ((?:VAR )?\w+)\.", context))
        places = {name: context.index(f"VAR {name} = ") for name in assigned}
        name = re.search(r"The value of VAR (\w+) is$", context)[1]
        hops = 0
        while assigned[name].startswith("VAR "):
            before = assigned[name].removeprefix("VAR ")
            assert places[before] < places[name]
            name, hops = before, hops + 1
        assert assigned[name] == answer.strip()
        assert item.spans[0].group == f"hops={hops}"
        values = {decoded(tokenizer, request.tokens[-request.scored :]).strip() for request in item.requests}
        assert values == {value for value in assigned.values() if value.isdigit()}
    assert {item.spans[0].group for item in items} == {f"hops={hops}" for hops in range(4)}


class TestBury:
    TEXT = "One two three. Four five six! Seven eight nine? Ten eleven twelve."

    @pytest.mark.parametrize(
        ("depth", "expected"),
        [
            (0.0, "F. One two three. Four five six! Seven eight nine? Ten eleven twelve."),
            (0.4, "One two three. Four five six! F. Seven eight nine? Ten eleven twelve."),
            (1.0, "One two three. Four five six! Seven eight nine? F. Ten eleven twelve."),
        ],
    )
    def test_a_fact_goes_to_the_sentence_end_nearest_to_its_depth(self, depth, expected):
        assert bury(self.TEXT, [(depth, "F.")]) == expected

    def test_facts_keep_the_order_of_their_depths(self):
        assert bury(self.TEXT, [(0.02, "B."), (0.01, "A."), (0.02, "C.")]).startswith("A. B. C. One")

    def test_text_without_sentences_is_refused(self, tokenizer, tmp_path):
        (tmp_path / "flat.txt").write_text("word " * 2000, encoding="utf-8")
        with pytest.raises(ValueError, match=r"the end of a sentence near depth 0.25"):
            TASKS["needle"].items(tokenizer, TaskOptions(length=1000, text=tmp_path / "flat.txt"), 2)


class TestDraw:
    def test_words_and_numbers_of_the_text_are_not_drawn(self):
        pool = ("chisel", "banjo", "kayak")
        assert set(Draw("0", "He sold CHISELS.").words(pool, 2)) == {"banjo", "kayak"}
        with pytest.raises(ValueError, match="text must leave 2 of the words chisel, banjo"):
            Draw("0", "a chisel and a kayak").words(pool, 2)
        free = Draw("1", "").numbers(3)
        assert not set(free[:1]) & set(Draw("1", f"call {free[0]} now").numbers(3))

    def test_a_seed_draws_the_same_in_every_process(self):
        assert Draw("Needle 3", "").numbers(2) == ["90995", "42602"]


class TestDistance:
    def test_only_repeats_in_the_last_quarter_are_graded(self, tokenizer, options):
        for item in TASKS["distance"].items(tokenizer, options, 4):
            (request,) = item.requests
            assert (len(request.tokens), request.scored) == (LENGTH, LENGTH // 4)
            first = LENGTH - request.scored
            found = copy_distances(request.tokens)
            wanted = {place for place in range(first, LENGTH) if found[place] > 0}
            assert {first + span.start for span in item.spans} == wanted
            for span in item.spans:
                low, high = map(int, span.group.removeprefix("distance=").split("-"))
                assert low <= found[first + span.start] <= high
                assert span.stop == span.start + 1

    def test_perplexity_is_of_the_repeats_alone(self):
        request = Request((1, 2, 3, 4, 5), 3)
        item = Item((request,), spans=(Span(0, 1, "distance=1-15"), Span(2, 3, "distance=16-63")))
        metrics = TASKS["distance"].metrics([item], [[Score((-1.0, -50.0, -3.0), (True,) * 3)]])
        assert {name: estimate.value for name, estimate in metrics.items()} == pytest.approx(
            {"perplexity": math.e**2, "perplexity@distance=1-15": math.e, "perplexity@distance=16-63": math.e**3}
        )

    def test_text_that_never_repeats_is_refused(self, tokenizer, tmp_path):
        (tmp_path / "text.txt").write_text("".join(map(chr, range(33, 127))), encoding="utf-8")
        with pytest.raises(ValueError, match="distance needs text that repeats"):
            TASKS["distance"].items(tokenizer, TaskOptions(length=80, text=tmp_path / "text.txt"), 1)


class TestSpans:
    REQUEST = Request((0,) * 5, 4)
    ITEMS = (
        Item((REQUEST, REQUEST), answer=1, spans=(Span(0, 4, "a"),)),
        Item((REQUEST, REQUEST), answer=0, spans=(Span(0, 4, "b"),)),
        Item((REQUEST, REQUEST), answer=0, spans=(Span(0, 4, "a"),)),
    )

    def score(self, each, *greedy):
        return Score((each,) * 4, greedy or (False,) * 4)

    def test_accuracy_is_of_the_likeliest_alternative(self):
        scores = [[self.score(-2.0), self.score(-1.0)]] * 3
        found = {name: (estimate.value, estimate.n) for name, estimate in accuracy(self.ITEMS, scores).items()}
        assert found == {"acc": (pytest.approx(1 / 3), 3), "acc@a": (0.5, 2), "acc@b": (0.0, 1)}

    def test_exactness_takes_every_token_of_the_right_alternative(self):
        wrong, right = self.score(-1.0, True, True, False, True), self.score(-1.0, *(True,) * 4)
        found = exactness(self.ITEMS, [[wrong, right], [wrong, right], [right, wrong]])
        assert (found["exact"].value, found["exact@a"].value, found["exact@b"].value) == (pytest.approx(2 / 3), 1, 0)

    def test_errors_are_over_items_not_over_spans(self):
        spans = tuple(Span(i, i + 1, "a") for i in range(4))
        items = [Item((self.REQUEST,), spans=spans)] * 2
        scores = [[self.score(-1.0, *(True,) * 4)], [self.score(-1.0, *(False,) * 4)]]
        found = exactness(items, scores)["exact"]
        assert (found.value, found.n) == (0.5, 2)
        assert found.stderr == pytest.approx(0.5)

    def test_perplexity_weighs_tokens(self):
        items = [Item((Request((0,) * 4, 3),), spans=(Span(0, 1, "a"), Span(1, 3, "b")))]
        found = perplexities(items, [[Score((-3.0, -1.0, -2.0), (False,) * 3)]])
        assert found["perplexity"].value == pytest.approx(math.exp(2))
        assert found["perplexity@b"].value == pytest.approx(math.exp(1.5))


def test_parts_end_where_the_text_up_to_their_end_would(tokenizer):
    tokens, ends = encode_parts(tokenizer, ("one ", "two", ".\n", "three"))
    assert [decoded(tokenizer, tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)] == [
        "one",
        " two",
        ".",
        "\nthree",
    ]
    assert tokens == encode(tokenizer, "one two.\nthree")
