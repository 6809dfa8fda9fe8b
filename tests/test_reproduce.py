"""The script of the paper's tables: its commands are ones that `sattn` takes."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from stochastic_attention import cli
from stochastic_attention.evaluation.methods import METHODS

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


def test_a_dry_run_prints_a_sweep_a_model(commands):
    *sweeps, report = commands
    assert [command[:3] for command in sweeps] == [
        ["sattn", "eval", name] for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")
    ]
    assert len({option(sweep, "--output") for sweep in sweeps}) == 2
    for sweep in sweeps:
        methods = option(sweep, "--methods").split(",")
        assert set(methods) <= set(METHODS)
        assert {"swa", "swa+sinks", "moba-k2", "moba", "sa", "union"} <= set(methods)
        assert option(sweep, "--budgets") == "16,32,64,128,256,512"
        assert option(sweep, "--seeds") == "3"
        assert option(sweep, "--tasks") == "mmlu,boolq,hellaswag,lambada_openai,arc_easy,arc_challenge"
    assert report[:2] == ["sattn", "report"]


def test_programs_run_only_where_they_are_allowed(commands):
    allowed = [shlex.split(line) for line in script("--dry-run", "--allow-code").stdout.splitlines()]
    assert option(allowed[0], "--tasks") == option(commands[0], "--tasks") + ",humaneval"
    assert allowed[0][-1] == "--allow-code"


def test_the_commands_are_ones_that_sattn_takes(commands):
    parser = cli.build_parser()
    for command in commands:
        parser.parse_args(command[1:])


def test_a_run_does_what_the_dry_run_says_and_stops_at_a_failure(tmp_path, commands):
    fake = tmp_path / "sattn"
    fake.write_text(f'#!/bin/sh\necho sattn "$@" >> "{tmp_path}/log"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert script(PATH=path).returncode == 0
    assert [shlex.split(line) for line in (tmp_path / "log").read_text().splitlines()] == commands
    (tmp_path / "sattn").write_text(f'#!/bin/sh\necho >> "{tmp_path}/tries"\nexit 3\n')
    assert script(PATH=path).returncode == 3
    assert (tmp_path / "tries").read_text() == "\n"


@pytest.mark.parametrize("options", [["--match", "both"], ["--output"], ["--data"], ["--quick"]])
def test_bad_options_are_refused_in_a_line(options):
    done = script("--dry-run", *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert options[0] in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
