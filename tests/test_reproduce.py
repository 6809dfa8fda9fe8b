"""The script of the paper's tables: its commands are ones that `sattn` takes, and its table adds up."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from stochastic_attention import cli
from stochastic_attention.evaluation.methods import METHODS
from stochastic_attention.records import Environment, Record

FOLDER = Path(__file__).parent.parent / "reproduce"
SCRIPT = FOLDER / "paper_tables.sh"


def script(*options, **environment):
    return subprocess.run(
        ["bash", SCRIPT, *options], capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def commands():
    done = script("--dry-run")
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def option(command, name):
    return command[command.index(name) + 1] if name in command else None


def test_a_dry_run_prints_every_run_once(commands):
    runs = [command for command in commands if command[:2] == ["sattn", "eval"]]
    assert len(runs) == 2 * (1 + 6 * 7)
    assert len({option(run, "--output") for run in runs}) == len(runs)
    assert {option(run, "--method") for run in runs} == {
        "full",
        "swa",
        "swa+sinks",
        "moba-k2",
        "moba",
        "sa",
        "sa-prefix",
        "union",
    }
    assert {option(run, "--method") for run in runs} <= set(METHODS)
    assert {option(run, "--budget") for run in runs} == {None, "16", "32", "64", "128", "256", "512"}
    assert {option(run, "--seeds") for run in runs if option(run, "--budget")} == {"3"}
    assert commands[-1][:2] == ["sattn", "report"]


def test_the_commands_are_ones_that_sattn_takes(commands):
    parser = cli.build_parser()
    for command in commands:
        if command[0] == "sattn" and command[1] in cli.COMMANDS:
            parser.parse_args(command[1:])


def test_the_tasks_are_those_of_the_harness(commands):
    lm_eval = importlib.util.find_spec("lm_eval")
    if lm_eval is None:
        pytest.skip("lm_eval is not installed")
    tasks = option(commands[0], "--tasks").split(",")
    definitions = Path(lm_eval.origin).parent / "tasks" / "mmlu" / "default"
    assert sorted(task for task in tasks if task.startswith("mmlu_")) == sorted(
        path.stem for path in definitions.glob("mmlu_*.yaml")
    )
    assert tasks[57:] == ["boolq", "hellaswag", "lambada_openai", "arc_easy", "arc_challenge"]


def test_a_run_does_what_the_dry_run_says_and_stops_at_a_failure(tmp_path, commands):
    for name in ("sattn", "python3"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/log"\n[ "$2" != fail ]\n')
        fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert script(PATH=path).returncode == 0
    assert [shlex.split(line) for line in (tmp_path / "log").read_text().splitlines()] == commands
    (tmp_path / "sattn").write_text(f'#!/bin/sh\necho >> "{tmp_path}/tries"\nexit 3\n')
    assert script(PATH=path).returncode == 3
    assert (tmp_path / "tries").read_text() == "\n"


@pytest.mark.parametrize("options", [["--match", "both"], ["--output"], ["--quick"]])
def test_bad_options_are_refused_in_a_line(options):
    done = script("--dry-run", *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert options[0] in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def paper_table():
    spec = importlib.util.spec_from_file_location("paper_table", FOLDER / "paper_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(task, seed, w_scored, n=10, **metrics):
    found = {name: {"value": value, "stderr": None, "n": n} for name, value in metrics.items()}
    return {"task": task, "seed": seed, "w_eff": w_scored / 2, "w_scored": w_scored, "metrics": found}


def test_the_table_weighs_subjects_by_questions_and_tasks_alike(paper_table, tmp_path, capsys):
    def save(method, budget, results):
        (tmp_path / f"{method}-{budget}").mkdir()
        config = {"method": method, "budget": budget, "match": "w_eff" if budget else "w_scored"}
        Record("sattn eval", config, Environment.current(), {"tasks": results}).save(
            tmp_path / f"{method}-{budget}" / "record.json"
        )

    mmlu = [result("mmlu_a", None, 100, 30, acc=0.5), result("mmlu_b", None, 20, 10, acc=0.1)]
    save("full", None, [*mmlu, result("arc_easy", None, 40, acc=0.2, acc_norm=0.8)])
    save("sa", 16, [result("boolq", seed, 32, acc=0.5 + seed / 10) for seed in range(3)])
    assert paper_table.main(tmp_path) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == text
    full, sa = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:4])
    assert full == ["full", "-", "40.0", "", "", "", "80.0", "", "60.0", "30.0", "60.0"]
    assert sa == ["sa", "16", "", "60.0 ± 10.0", "", "", "", "", "60.0 ± 10.0", "16.0", "32.0"]
    assert "Budgets are means of w_eff;" in text


def test_a_folder_without_records_is_refused(paper_table, tmp_path, capsys):
    assert paper_table.main(tmp_path) == 2
    assert "got none" in capsys.readouterr().err
