import errno
import io
import os
import sys
from pathlib import Path

import pytest

import stochastic_attention
from stochastic_attention import cli, commands
from stochastic_attention.commands import compare, generate, options

COMPARE_OPTIONS = {
    "--model": "smollm2-135m-instruct",
    "--methods": "full,swa,swa+sinks,sa,sa-prefix,union,moba",
    "--budgets": "64,128",
    "--tasks": "recall,perplexity,hellaswag",
    "--limit": "20",
    "--seeds": 3,
    "--match": "w_scored",
    "--length": 1024,
    "--text": None,
    "--data": None,
    "--output": "results/compare",
    "--device": "cpu",
    "--dtype": "float32",
    "--backend": None,
    "--batch-tokens": 4096,
    "--repeats": 3,
}


GENERATE_OPTIONS = {
    "--model": "smollm2-135m-instruct",
    "--prompt": "x",
    "--prompt-file": None,
    "--chat": False,
    "--method": "union",
    "--budget": None,
    "--decode": "stochastic",
    "--layers": "all",
    "--routing-seed": 0,
    "--max-new-tokens": 128,
    "--eos": True,
    "--temperature": 0.0,
    "--top-p": 1.0,
    "--seed": 0,
    "--no-full": False,
    "--output": None,
    "--device": "cpu",
    "--dtype": "float32",
    "--backend": None,
}

TRAIN_OPTIONS = {"--config": "run.yaml", "--set": [], "--output": None, "--resume": True, "--cache": None}

EVAL_OPTIONS = {
    "--model": "x",
    "--tasks": "hellaswag,piqa,winogrande",
    "--shots": None,
    "--chat-template": False,
    "--log-samples": False,
    "--methods": "",
    "--budgets": "",
    "--match": "w_scored",
    "--seeds": 1,
    "--limit": "",
    "--length": None,
    "--data": None,
    "--allow-code": False,
    "--offline": False,
    "--batch-size": 8,
    "--output": "results/eval",
    "--device": None,
    "--device-map": None,
    "--dtype": "float32",
    "--backend": None,
}

PERPLEXITY_OPTIONS = {
    "--models": ["x", "sa=y"],
    "--text": "embedded",
    "--length": 1024,
    "--windows": None,
    "--draws": 1,
    "--batch-tokens": 4096,
    "--output": "results/perplexity",
    "--device": "cpu",
    "--dtype": "float32",
}

RECOMMEND_OPTIONS = {
    "--model": "smollm2-135m-instruct",
    "--budget": 64,
    "--text": None,
    "--tasks": "perplexity,recall",
    "--windows": 9,
    "--candidates": 54,
    "--finalists": 3,
    "--seeds": 3,
    "--match": "w_scored",
    "--length": 1024,
    "--data": None,
    "--name": "recommended",
    "--output": "results/recommend",
    "--device": "cpu",
    "--dtype": "float32",
    "--backend": None,
    "--batch-tokens": 4096,
}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["compare"], COMPARE_OPTIONS),
        (["generate", "--prompt", "x"], GENERATE_OPTIONS),
        (["train", "--config", "run.yaml"], TRAIN_OPTIONS),
        (["eval", "x"], EVAL_OPTIONS),
        (["perplexity", "x", "sa=y"], PERPLEXITY_OPTIONS),
        (["recommend", "--budget", "64"], RECOMMEND_OPTIONS),
    ],
    ids=["compare", "generate", "train", "eval", "perplexity", "recommend"],
)
def test_the_options_are_these(arguments, options):
    args = vars(cli.build_parser().parse_args(arguments))
    assert args.pop("command") == arguments[0]
    shown = {f"--{name.replace('_', '-')}": str(v) if isinstance(v, Path) else v for name, v in args.items()}
    assert shown == options


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"sattn {command}" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["compare", "--methods", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sattn compare: methods must be among")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "extra"), [("datasets", "evaluation"), ("transformers", "hf"), ("scipy", "analysis")]
)
def test_a_missing_extra_is_one_sentence_that_says_how_to_get_it(monkeypatch, capsys, module, extra):
    def run(_):
        raise ModuleNotFoundError(f"No module named '{module}'", name=f"{module}.sub")

    monkeypatch.setattr(compare, "run", run)
    assert cli.main(["compare"]) == 2
    error = capsys.readouterr().err
    assert f'pip install "stochastic-attention[{extra}]"' in error
    assert error.count("\n") == 1


def test_a_full_disk_is_one_line_and_another_fault_of_files_is_not_explained_away(monkeypatch, capsys):
    def run(error):
        def fail(_):
            raise error

        monkeypatch.setattr(compare, "run", fail)
        return cli.main(["compare"])

    assert run(OSError(errno.ENOSPC, "No space left on device", "cells.jsonl")) == 1
    assert capsys.readouterr().err == "sattn compare: [Errno 28] No space left on device: 'cells.jsonl'\n"
    with pytest.raises(FileNotFoundError):
        run(FileNotFoundError(errno.ENOENT, "No such file or directory"))


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def run(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run", run)
    assert cli.main(["compare"]) == 130
    assert capsys.readouterr().err == "sattn compare: interrupted\n"


def test_a_reader_that_has_had_enough_is_no_fault(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(compare, "run", lambda _: print("a line"))
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["compare"]) == 141
        closed.flush()  # as Python does at its end
    assert capsys.readouterr().err == ""


def test_a_character_that_the_terminal_lacks_loses_no_output(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(compare, "run", lambda _: print("1 ± 2 ↑") or 0)
    assert cli.main(["compare"]) == 0
    assert terminal.buffer.getvalue() == b"1 \\xb1 2 \\u2191\n"


@pytest.mark.parametrize(("command", "option"), [("compare", "--seed=7"), ("reach", "--seed=7"), ("eval", "--task=x")])
def test_an_option_is_not_taken_for_one_that_begins_like_it(command, option, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, *(["x"] if command == "eval" else []), option])
    assert stop.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{stochastic_attention.__version__}\n"


def test_another_missing_module_is_not_explained_away(monkeypatch):
    def run(_):
        raise ModuleNotFoundError("No module named 'ours'", name="ours")

    monkeypatch.setattr(compare, "run", run)
    with pytest.raises(ModuleNotFoundError, match="ours"):
        cli.main(["compare"])


@pytest.mark.parametrize(
    ("text", "limits"),
    [("5", (5, 5)), ("a=3,b=4", (3, 4)), ("5,b=7", (5, 7)), ("b=7, 5", (5, 7)), ("a=3", (3, None)), ("", (None, None))],
)
def test_limits_are_for_all_tasks_or_one(text, limits):
    assert options.split_limits(text, ("a", "b")) == limits


@pytest.mark.parametrize("text", ["x", "5,c=2", "-1", "a=,5", "²"])
def test_limits_that_do_not_fit_the_tasks_are_refused(text):
    with pytest.raises(ValueError, match="limit must"):
        options.split_limits(text, ("a", "b"))


def test_a_comparison_needs_a_limit_for_every_task(capsys):
    assert cli.main(["compare", "--tasks", "recall,perplexity", "--limit", "recall=2"]) == 2
    assert "limit must give a number for perplexity, got 'recall=2'" in capsys.readouterr().err


def test_budgets_are_integers():
    with pytest.raises(ValueError, match="budgets must be integers separated by commas, got '64,x'"):
        options.split_numbers("budgets", "64,x")


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", "all"), ("every 4th", "every 4th"), ("3", (3,)), ("0, 3,5", (0, 3, 5)), ("0,x", "0,x"), ("", "")],
)
def test_layers_are_indices_or_a_name(text, layers):
    assert generate.split_layers(text) == layers


def test_what_is_only_needed_at_the_end_is_missed_at_the_start(monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "matplotlib" else name)
    commands.require("tqdm")
    with pytest.raises(ModuleNotFoundError) as missing:
        commands.require("tqdm", "matplotlib")
    assert missing.value.name == "matplotlib"
