"""The benchmark command: what it measures, and that nothing is timed that is wrong."""

import shlex

import pytest
import torch

from stochastic_attention import backend_names, cli
from stochastic_attention.benchmark import speed, workloads
from stochastic_attention.benchmark.memory import measure_memory
from stochastic_attention.benchmark.oracle import check_against_oracle, check_decoding_against_oracle
from stochastic_attention.benchmark.workloads import METHODS, Workload, patterns_of
from stochastic_attention.commands import bench
from stochastic_attention.records import Environment, Record

SMALL = ["--heads", "2", "--head-dim", "8", "--window", "8", "--repeats", "1"]


def test_every_pattern_is_measured_at_every_length_both_ways(tmp_path, capsys):
    lengths, passes = (64, 130), ("forward", "backward")
    names = ",".join(METHODS)
    options = [
        "--patterns",
        names,
        "--lengths",
        "64,130",
        "--passes",
        ",".join(passes),
        "--output",
        tmp_path / "b.json",
    ]
    assert cli.main(["bench", *SMALL, *map(str, options)]) == 0
    speed = Record.load(tmp_path / "b.json").results["speed"]
    got = [(line["length"], line["backward"], line["pattern"]) for line in speed]
    assert got == [(n, which == "backward", name) for n in lengths for which in passes for name in METHODS]
    for line in speed:
        assert line["speedup"] == pytest.approx(line["full_seconds"] / line["seconds"])
        if line["pattern"] != "moba":  # which has no mask
            pairs = sum(int(p.dense_mask(line["length"]).sum()) for p in patterns_of(line["pattern"], 8))
            assert line["limit"] == pytest.approx(line["length"] * (line["length"] + 1) / 2 / pairs)
    assert f"{speed[-1]['speedup']:.2f}x" in capsys.readouterr().out


def test_a_step_of_decoding_is_measured(tmp_path, capsys):
    names = ",".join(METHODS)
    options = ["--patterns", names, "--lengths", "64,130", "--passes", "decode", "--output", tmp_path / "b.json"]
    assert cli.main(["bench", *SMALL, *map(str, options)]) == 0
    results = Record.load(tmp_path / "b.json").results
    got = [(line["length"], line["pattern"]) for line in results["decode"]]
    assert got == [(n, name) for n in (64, 130) for name in METHODS]
    assert results["speed"] == []
    for line in results["decode"]:
        assert line["speedup"] == pytest.approx(line["full_seconds"] / line["seconds"])
        if line["pattern"] != "moba":
            keys = sum(int(p.dense_mask(line["length"])[0, -1].sum()) for p in patterns_of(line["pattern"], 8))
            assert line["limit"] == pytest.approx(line["length"] / keys)
    assert f"{results['decode'][-1]['speedup']:.2f}x" in capsys.readouterr().out


@pytest.mark.parametrize(("draw", "steps"), [("once", {0}), ("always", {0, 1, 2})])
def test_permutations_are_drawn_once_or_for_every_call(draw, steps, tmp_path, monkeypatch):
    seen = []

    def attend(*inputs, step, **options):
        seen.append(step)
        return right(*inputs, step=step, **options)

    right = speed.attend
    monkeypatch.setattr(speed, "attend", attend)
    options = ["--patterns", "block", "--lengths", "64", "--draw", draw, "--output", str(tmp_path / "b.json")]
    assert cli.main(["bench", *SMALL, *options, "--repeats", "2"]) == 0
    assert {*seen} == steps


def test_a_run_is_taken_up_where_it_stopped(tmp_path, capsys):
    options = [*SMALL, "--patterns", "swa", "--lengths", "64,130", "--output", str(tmp_path / "b.json")]
    assert cli.main(["bench", *options, "--budget", "0"]) == 0
    said = capsys.readouterr()
    assert said.err.count("left out: 0 s are left") == 2
    assert Record.load(tmp_path / "b.json").results["speed"] == []
    for _ in range(2):
        assert cli.main(["bench", *options, "--resume"]) == 0
        assert [row["length"] for row in Record.load(tmp_path / "b.json").results["speed"]] == [64, 130]
    assert cli.main(["bench", *options, "--resume", "--dtype", "float64"]) == 2
    assert "dtype must be 'float32' to resume" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "measure_speed", stopped)
    options = [*SMALL, "--patterns", "swa", "--lengths", "64", "--output", str(tmp_path / "b.json")]
    for resume in ([], ["--resume"]):
        assert cli.main(["bench", *options, *resume]) == 130
        assert capsys.readouterr().err.endswith(f"to resume: sattn bench {shlex.join([*options, '--resume'])}\n")


def test_the_fastest_full_attention_is_the_one_to_beat_and_a_missing_one_says_why(tmp_path):
    options = [
        "--patterns",
        "swa",
        "--lengths",
        "64",
        "--full",
        "auto,cudnn,flash",
        "--output",
        str(tmp_path / "b.json"),
    ]
    assert cli.main(["bench", *SMALL, *options]) == 0
    results = Record.load(tmp_path / "b.json").results
    assert {row["reason"].partition(":")[0] for row in results["full"] if row["kernel"] == "cudnn"} == {"RuntimeError"}
    seconds = {row["kernel"]: row["seconds"] for row in results["full"]}
    assert seconds.pop("cudnn") is None
    assert results["speed"][0]["full_seconds"] == min(seconds.values())
    assert seconds[results["speed"][0]["full_kernel"]] == min(seconds.values())


def test_without_matplotlib_there_is_no_figure_and_all_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda _name: None)
    options = ["--patterns", "swa", "--lengths", "64", "--output", str(tmp_path / "b.json")]
    assert cli.main(["bench", *SMALL, *options, "--plot", str(tmp_path / "b.png")]) == 0
    assert "is not drawn: matplotlib is not installed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_memory_is_measured_in_a_process_of_its_own():
    workload = Workload(length=4096, heads=2, head_dim=16, window=16, device="cpu", dtype="float32")
    memory = measure_memory("sliding", workload, backward=True, backend=None)
    inputs = 4 * 2 * 4096 * 16
    # At least the output and the three gradients; far below the 128 MiB of a table of all pairs.
    assert 4 * inputs <= memory.extra_bytes < 4 * 2 * 4096**2


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(*inputs, backend=None, **options):
        return right(*inputs, backend=backend, **options) * (1.0 if backend == "reference" else 1.01)

    right = workloads.attention
    monkeypatch.setattr(workloads, "attention", wrong)
    workload = Workload(length=64, heads=2, head_dim=8, window=8, device="cpu", dtype="float32")
    with pytest.raises(RuntimeError, match="block: out is off the oracle"):
        check_against_oracle(["block"], workload, None)
    with pytest.raises(RuntimeError, match="block: out is off the oracle"):
        check_decoding_against_oracle(["block"], workload, None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_gate_lets_rounding_pass(dtype):
    workload = Workload(length=64, heads=2, head_dim=8, window=8, device="cpu", dtype=dtype)
    check_against_oracle(METHODS, workload, "blocked")
    check_decoding_against_oracle(METHODS, workload, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--patterns", "diagonal"], "patterns must be one of 'swa'"),
        (["--patterns", ","], "patterns must be distinct and at least one, got none"),
        (["--patterns", "swa,swa"], "patterns must be distinct and at least one, got swa, swa"),
        (["--passes", ""], "passes must be distinct and at least one, got none"),
        (["--full", ""], "full must be distinct and at least one, got none"),
        (["--lengths", ""], "lengths must be distinct and at least one, got none"),
        (["--lengths", "8,8"], "lengths must be distinct and at least one, got 8, 8"),
        (["--head-dim", ","], "head_dim must be distinct and at least one, got none"),
        (["--passes", "sideways"], "passes must be one of"),
        (["--passes", "forward,decode", "--memory"], "memory is measured of forward and backward, not of decode"),
        (["--lengths", "64,x"], "lengths must be integers separated by commas, got '64,x'"),
        (["--repeats", "0"], "repeats must be an integer >= 1, got 0"),
        (
            ["--predictions", "nowhere.json"],
            "predictions must be a file that `sattn predict` wrote, got 'nowhere.json'",
        ),
        (["--draw", "never"], "draw must be one of 'once', 'always', got 'never'"),
        (["--draw", "always", "--passes", "decode"], "draw must be 'once' for decode"),
        (["--replay"], "replay needs a CUDA device, got 'cpu'"),
        (["--full", "fast"], "full must be one of"),
        (["--budget", "-1"], "budget must be a finite number >= 0.0, got -1.0"),
        (["--tokens", "-1"], "tokens must be an integer >= 0, got -1"),
        (["--head-dim", "8,0"], "head_dim must be an integer >= 1, got 0"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "nowhere"], "device must be one that torch has here, got 'nowhere'"),
        (["--device", "meta"], "device must be the CPU or a CUDA device, no other can be timed, got 'meta'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_options_are_told_in_one_line(options, message, capsys, tmp_path):
    assert cli.main(["bench", *options, "--output", str(tmp_path / "b.json")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(option, capsys, tmp_path):
    name = option.removeprefix("--")
    options = [*SMALL, "--patterns", "swa", "--lengths", "64", "--output", str(tmp_path / "b.json")]
    assert cli.main(["bench", *options, option, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"sattn bench: {name} must be a file to write, got {tmp_path}, which is no file\n"
    assert cli.main(["bench", *options, option, "/dev/null"]) == 2
    assert not list(tmp_path.iterdir())


def test_memory_is_refused_where_the_system_does_not_tell_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.sys, "platform", "darwin")
    assert cli.main(["bench", *SMALL, "--memory", "--output", str(tmp_path / "b.json")]) == 2
    assert "memory on the CPU is told by Linux alone: leave --memory out" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[1]", '{"command": "sattn bench"}'])
def test_a_file_that_is_no_record_is_named(content, capsys, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    for options in (["--resume", "--output"], ["--output", str(tmp_path / "b.json"), "--predictions"]):
        assert cli.main(["bench", *SMALL, *options, str(path)]) == 2
        assert f"{path} is no record that can be read: " in capsys.readouterr().err


def test_a_record_of_something_else_holds_no_predictions(capsys, tmp_path):
    path = tmp_path / "record.json"
    Record("sattn reach", {}, Environment.current(), {}).save(path)
    assert cli.main(["bench", *SMALL, "--predictions", str(path), "--output", str(tmp_path / "b.json")]) == 2
    assert f"predictions must be a file that `sattn predict` wrote, got '{path}'" in capsys.readouterr().err


def test_backends_are_listed_for_each_kind_of_pattern(capsys):
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    devices = 1 + torch.cuda.is_available()
    assert len(lines) == devices * 2 * 6 * 2 * len(backend_names())
    assert all(line.endswith("yes") for line in lines if " reference " in line)
