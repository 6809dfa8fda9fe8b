import json
import math

import pytest

from stochastic_attention.evaluation.requests import Item, Request, Score
from stochastic_attention.evaluation.tasks import TASKS, TaskOptions, check_tasks
from stochastic_attention.evaluation.tasks.base import encode_pair, first_tokens, mean, perplexity, spread


class Beginning:
    """A tokenizer that begins every text with a token of its own."""

    bos_token_id = 7

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens=True, **options):
        tokens = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return {"input_ids": [7, *tokens] if add_special_tokens else tokens}


class TestText:
    def test_perplexity_windows_stay_in_one_document(self, tokenizer, text_file):
        items = TASKS["perplexity"].items(tokenizer, TaskOptions(length=60, text=text_file), 10)
        texts = [tokenizer.decode(list(item.requests[0].tokens)) for item in items]
        assert all(text.islower() or text.isupper() for text in texts)
        assert any(text.islower() for text in texts)
        assert any(text.isupper() for text in texts)
        for item in items:
            assert len(item.requests[0].tokens) == 60
            assert item.requests[0].scored == 59

    @pytest.mark.parametrize("begin", [[], [7]], ids=["no beginning", "a beginning"])
    @pytest.mark.parametrize(("length", "passage"), [(64, 16), (63, 16), (100, 25)])
    def test_recall_repeats_the_passage_at_the_end_and_scores_it(self, tokenizer, text_file, length, passage, begin):
        options = TaskOptions(length=length, text=text_file)
        for item in TASKS["recall"].items(Beginning(tokenizer) if begin else tokenizer, options, 3):
            (request,) = item.requests
            assert len(request.tokens) == length
            assert request.scored == passage
            assert [*request.tokens[: len(begin)]] == begin
            text = request.tokens[len(begin) :]
            assert text[:passage] == text[-passage:]
            window = tokenizer.decode(list(text[:-passage])).lower()
            assert window in text_file.read_text(encoding="utf-8").lower()

    def test_more_windows_than_the_text_holds_is_an_error(self, tokenizer, text_file):
        with pytest.raises(ValueError, match="limit asks for 1000 windows of 60 tokens"):
            TASKS["perplexity"].items(tokenizer, TaskOptions(length=60, text=text_file), 1000)

    def test_a_missing_text_file_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"perplexity: text must be a file.*nowhere"):
            check_tasks(["perplexity"], TaskOptions(text=tmp_path / "nowhere"))


class TestLambada:
    ROWS = (
        {"context": "a line separator \u2028 stays in its row, said the", "continuation": "man"},
        {"context": "she opened the", "continuation": "door"},
    )

    @pytest.fixture
    def options(self, tmp_path):
        lines = [json.dumps(row, ensure_ascii=False) for row in self.ROWS]
        (tmp_path / "lambada_openai.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return TaskOptions(data=tmp_path)

    def test_the_continuation_is_scored_after_a_space(self, tokenizer, options):
        items = TASKS["lambada"].items(tokenizer, options, 2)
        for item, row in zip(items, self.ROWS, strict=True):
            (request,) = item.requests
            assert tokenizer.decode(list(request.tokens)) == f"{row['context']} {row['continuation']}"
            assert tokenizer.decode(list(request.tokens[-request.scored :])) == f" {row['continuation']}"

    def test_accuracy_counts_greedy_matches(self, tokenizer, options):
        items = TASKS["lambada"].items(tokenizer, options, 2)
        metrics = TASKS["lambada"].metrics(items, [[Score((-4.0,), (True,))], [Score((-5.0,), (False,))]])
        assert metrics["acc"].value == 0.5
        assert metrics["perplexity"].value == pytest.approx(math.exp(9 / 9))  # " man" and " door" are 9 bytes

    def test_what_is_missing_is_named_before_any_work(self, tmp_path):
        with pytest.raises(ValueError, match="lambada: it needs --data DIR"):
            check_tasks(["lambada"], TaskOptions())
        with pytest.raises(ValueError, match=r"holds lambada_openai.jsonl, got .*empty"):
            check_tasks(["lambada"], TaskOptions(data=tmp_path / "empty"))


class TestStatistics:
    def test_mean_and_standard_error(self):
        estimate = mean([1.0, 0.0, 1.0, 1.0])
        assert estimate.value == 0.75
        assert estimate.stderr == pytest.approx(0.25)
        assert mean([1.0]).stderr is None

    def test_perplexity_weighs_tokens_not_items(self):
        items = [Item((Request((0,) * 4, 3),)), Item((Request((0,) * 2, 1),))]
        estimate = perplexity(items, [[Score((-4.0, -2.0), (True, False))], [Score((-1.0,), (False,))]])
        assert estimate.value == pytest.approx(math.exp(7 / 4))
        assert estimate.n == 2

    def test_perplexity_error_is_that_of_the_mean_loss_where_items_are_alike(self):
        items = [Item((Request((0,) * 11, 10),)) for _ in range(4)]
        losses = [10.0, 12.0, 9.0, 15.0]
        estimate = perplexity(items, [[Score((-loss,), (False,))] for loss in losses])
        assert estimate.stderr == pytest.approx(estimate.value * mean([loss / 10 for loss in losses]).stderr)

    def test_spread_takes_rows_from_end_to_end(self):
        assert spread(list(range(10)), 3, "rows") == [0, 3, 6]
        assert spread([1, 2], 2, "rows") == [1, 2]


class TestEncoding:
    def test_spaces_at_the_end_of_a_context_go_with_the_continuation(self, tokenizer):
        tokens, scored = encode_pair(tokenizer, "one ", "two")
        assert tokenizer.decode(tokens) == "one two"
        assert tokenizer.decode(tokens[-scored:]) == " two"

    def test_a_tokenizer_that_begins_texts_keeps_its_beginning(self, tokenizer):
        assert first_tokens(Beginning(tokenizer)) == [7]
        assert encode_pair(Beginning(tokenizer), "a", "b")[0][0] == 7
        assert first_tokens(tokenizer) == []


def test_unknown_tasks_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"tasks must be among perplexity, recall, .*got nonsense"):
        check_tasks(["nonsense"], TaskOptions())
