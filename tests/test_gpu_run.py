"""What a person with a GPU runs: the script's commands, the check, the predictions. Here on the CPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stochastic_attention import cli
from stochastic_attention.benchmark import oracle
from stochastic_attention.benchmark.prediction import PREDICTED
from stochastic_attention.benchmark.targets import against_targets
from stochastic_attention.benchmark.workloads import PATTERNS
from stochastic_attention.records import Record

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
# Stands for Python: notes how it was called, and fails where it is told to.
STUB = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
sys.exit(sys.argv[3] == os.environ.get("FAILING"))
"""


def run_script(tmp_path: Path, *arguments: str, failing: str = "") -> tuple[int, list[list[str]]]:
    """The exit code, and the command lines that `python -m stochastic_attention` was given."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)
    calls.write_text("")
    environment = {**os.environ, "PYTHON": str(python), "CALLS": str(calls), "FAILING": failing}
    command = ["bash", str(SCRIPT), *arguments, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    assert all(line[:2] == ["-m", "stochastic_attention"] for line in lines)
    return done.returncode, [line[2:] for line in lines]


class TestScript:
    def test_it_checks_first_and_keeps_within_its_budget(self, tmp_path):
        code, calls = run_script(tmp_path, "--budget", "100")
        assert code == 0
        assert [call[0] for call in calls] == ["check", *["bench"] * 4]
        parsed = [cli.build_parser().parse_args(call) for call in calls]  # or it exits
        assert all(args.device == "cuda" for args in parsed)
        assert 0 < parsed[1].budget <= 40
        assert 0 < parsed[2].budget <= 40
        assert 0 < parsed[3].budget <= 90
        assert [(args.draw, args.replay) for args in parsed[2:]] == [("once", False), ("always", False), ("once", True)]
        assert "moba" not in parsed[1].patterns

    @pytest.mark.parametrize(("failing", "calls"), [("check", 1), ("bench", 5)])
    def test_what_is_wrong_is_not_timed_and_what_fails_is_told_at_the_end(self, tmp_path, failing, calls):
        code, made = run_script(tmp_path, failing=failing)
        assert code == 1
        assert len(made) == calls

    def test_a_small_budget_leaves_none_rather_than_less(self, tmp_path):
        _, calls = run_script(tmp_path, "--budget", "5")
        assert [call[-1] for call in calls[1:]] == ["0"] * 4

    def test_an_unknown_option_is_explained(self, tmp_path):
        assert run_script(tmp_path, "--nonsense") == (2, [])


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.py")), ids=lambda path: path.name)
def test_scripts_in_python_import_what_there_is(script):
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), script.name, "exec"))


class TestCheck:
    SMALL = ("--window", "8", "--lengths", "1,37", "--head-dims", "8")

    def test_every_pattern_agrees(self, capsys):
        assert cli.main(["check", *self.SMALL]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 * (len(PATTERNS) + 1)
        assert all(line.endswith("agrees with the oracle") for line in lines)

    @pytest.mark.slow
    def test_workers_find_the_same(self, capsys):
        assert cli.main(["check", *self.SMALL, "--dtypes", "float32", "--workers", "2"]) == 0
        assert capsys.readouterr().out.count("agrees") == len(PATTERNS) + 1

    @pytest.mark.parametrize("wrong", ["scale", "crash"])
    def test_what_is_wrong_is_red_and_ends_with_1(self, monkeypatch, capsys, wrong):
        def broken(q, k, v, pattern, *, backend=None, **options):
            if backend != "reference" and pattern.kind == "moba":
                if wrong == "crash":
                    raise RuntimeError("illegal address\nand more")
                options["scale"] = 0.36  # in place of 0.354
            return right(q, k, v, pattern, backend=backend, **options)

        right = oracle.attention
        monkeypatch.setattr(oracle, "attention", broken)
        assert cli.main(["check", *self.SMALL, "--dtypes", "float32"]) == 1
        said = capsys.readouterr()
        assert [line.split()[0] for line in said.out.splitlines() if line.endswith("WRONG")] == ["moba"]
        assert "\033[31mWRONG: 1 of 8 checks failed" in said.err
        assert ("out is off the oracle" if wrong == "scale" else "RuntimeError: illegal address") in said.err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--dtypes", "int8"], "dtypes must be one of"),
            (["--lengths", "0"], "lengths must be an integer >= 1, got 0"),
            (["--lengths", ""], "lengths must be distinct and at least one, got none"),
            (["--dtypes", ""], "dtypes must be distinct and at least one, got none"),
            (["--head-dims", ""], "head_dims must be distinct and at least one, got none"),
            (["--backend", "nonsense"], "backend must be one of 'gather'"),
            (["--workers", "0"], "workers must be an integer >= 1"),
            (["--device", "nowhere"], "device must be one that torch has here"),
        ],
        ids=lambda x: x[0] if isinstance(x, list) else "",
    )
    def test_bad_options_are_told_in_one_line(self, options, message, capsys):
        assert cli.main(["check", *options]) == 2
        assert message in capsys.readouterr().err


class TestPredict:
    def predict(self, tmp_path: Path) -> Path:
        path = tmp_path / "predictions.json"
        options = (
            "--lengths",
            "2048",
            "--decode-lengths",
            "4096",
            "--heads",
            "2",
            "--window",
            "64",
            "--head-dim",
            "64",
        )
        assert cli.main(["predict", *options, "--tokens", "4096", "--output", str(path)]) == 0
        return path

    def test_they_are_marked_as_predictions_and_stand_beside_measurements(self, tmp_path, capsys):
        path = self.predict(tmp_path)
        assert path.with_suffix(".md").read_text().startswith("Predicted, not measured")
        rows = Record.load(path).results["predictions"]
        assert [(row["direction"], row["pattern"]) for row in rows] == [
            (direction, name) for direction in ("forward", "backward", "decode") for name in PREDICTED
        ]
        for row in rows:
            assert row["speedup"] == pytest.approx(row["full_seconds"] / row["seconds"])
            assert row["counts"]["pairs_computed"] >= row["counts"]["pairs_needed"] > 0
            assert row["counts"]["flops"] > 0
        capsys.readouterr()
        options = ("--lengths", "2048", "--heads", "2", "--window", "64", "--tokens", "4096", "--repeats", "1")
        figure, record = tmp_path / "b.png", tmp_path / "b.json"
        files = ("--predictions", str(path), "--plot", str(figure), "--output", str(record))
        assert cli.main(["bench", *options, *files, "--patterns", "swa,block,gated"]) == 0
        assert capsys.readouterr().out.count("predicted") == 3
        assert figure.read_bytes().startswith(b"\x89PNG")

    def test_targets_are_met_or_missed(self):
        cell = {"backward": False, "length": 8192, "head_dim": 64}
        speed = [
            {**cell, "pattern": name, "speedup": speedup, "seconds": 8 / speedup}
            for name, speedup in {"swa": 9.0, "sliding": 5.0, "block": 8.5, "gated": 4.0}.items()
        ]
        memory = [{**cell, "pattern": name, "extra_bytes": x} for name, x in {"full": 100, "block": 120}.items()]
        predicted = [{**row, "direction": "forward", "speedup": 2.0} for row in speed]
        lines = against_targets({"speed": speed, "memory": memory}, predicted).splitlines()[2:]
        assert [[cell.strip() for cell in line.split("|")[4:-1]] for line in lines] == [
            [">= 8", "8.50", "2.00", "met"],
            ["<= 2.2", "2.25", "2.25", "missed"],
            ["<= 1.1", "1.20", "-", "missed"],
        ]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--patterns", "moba"], "patterns must be one of"),
            (["--patterns", ""], "patterns must be distinct and at least one, got none"),
            (["--decode-lengths", ""], "decode_lengths must be distinct and at least one, got none"),
            (["--output", "table.md"], "output must be another file than the table beside it, which ends in .md"),
            (["--output", "."], "output must be a file to write, got ., which is no file"),
            (["--head-dim", "96", "--lengths", "256"], "head_dim must be one of 64, 128 to be predicted, got 96"),
        ],
        ids=lambda x: x[0] if isinstance(x, list) else "",
    )
    def test_what_cannot_be_predicted_is_told(self, options, message, capsys, tmp_path):
        assert cli.main(["predict", "--output", str(tmp_path / "p.json"), *options]) == 2
        assert message in capsys.readouterr().err
