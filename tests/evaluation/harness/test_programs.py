"""Programs that are run to see whether they pass: none of them can hang, hurt or fool its caller by accident."""

import os
import time

import pytest

from stochastic_attention.evaluation.harness.programs import passes


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("assert 1 + 1 == 2", True),
        ("print('é' * 10**6)", True),
        ("assert 1 + 1 == 3", False),
        ("def f(:", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("raise SystemExit", False),
        ("input()", False),
        ("import os; assert not os.listdir() and 'HF_TOKEN' not in os.environ", True),
        ("import stochastic_attention_of_nobody", False),
        ("whole = 'x' * 2**33", False),
        ("'\ud800'", True),
    ],
)
def test_only_what_runs_to_its_end_passes(program, expected, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert passes(program, seconds=60) is expected


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_that_does_not_end_is_ended(program):
    assert not passes(program, seconds=1)


def test_what_a_program_starts_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    start = "import subprocess; child = subprocess.Popen(['sleep', '1000'], executable='/bin/sleep')"
    assert passes(f"{start}; open({str(note)!r}, 'w').write(str(child.pid))", seconds=60)
    pid = int(note.read_text())
    for _ in range(500):
        if not running(pid):
            return
        time.sleep(0.01)
    raise AssertionError("the child runs on")


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # ended, but its parent is gone and nobody has asked for its status yet
        return file.read().split()[2] != "Z"
