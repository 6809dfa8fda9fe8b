"""Checkpoints are complete or absent; the log of losses tells each step once."""

import errno

import pytest

from stochastic_attention.lm import checkpoints as c
from stochastic_attention.lm.loss_log import LossLog


def write(folder, step, size=1):
    path = c.unfinished(folder) / f"checkpoint-{step}"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "weights").write_bytes(b"x" * size)


def test_the_newest_are_kept_and_what_is_unfinished_is_none(tmp_path):
    assert c.newest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 9):
        write(tmp_path, step)
        c.finish(tmp_path, step, keep=2)
    write(tmp_path, 11)
    assert [c.step_of(path) for path in c.checkpoints(tmp_path)] == [9, 10]
    assert c.newest_checkpoint(tmp_path).name == "checkpoint-10"
    c.clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]


def test_a_checkpoint_takes_the_place_of_one_of_its_step(tmp_path):
    for size in (1, 2):
        write(tmp_path, 4, size)
        assert (c.finish(tmp_path, 4, keep=1) / "inner" / "weights").stat().st_size == size


@pytest.mark.parametrize(
    ("has_one", "free", "needed"), [(False, 100, 1000), (True, 5000, 7000), (True, 8000, None), (False, 1000, None)]
)
def test_room_is_looked_for_first(tmp_path, monkeypatch, has_one, free, needed):
    """As much as the newest took, or the tensors, and some more."""
    if has_one:
        write(tmp_path, 1, 7000)
        c.finish(tmp_path, 1, keep=1)
    monkeypatch.setattr(c, "_SLACK", 0)
    monkeypatch.setattr(c.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    if needed is None:
        c.check_room(tmp_path, 1000)
        return
    kept = "the last complete one is .*checkpoint-1" if has_one else "there is none before it"
    with pytest.raises(c.DiskFullError, match=f"{needed} bytes are needed, {free} are free; {kept}") as full:
        c.check_room(tmp_path, 1000)
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Quota exceeded"), True),
        (OSError(errno.EACCES, "denied"), False),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 73792 vs 73684"), True),
        (Exception("No space left on device (os error 28)"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_who_says_that_the_disk_is_full(error, full):
    assert c.is_disk_full(error) is full


def test_a_log_is_taken_back_to_a_step(tmp_path):
    log = LossLog(tmp_path / "loss.jsonl")
    assert log.entries() == []
    log.truncate(3)
    for step in range(1, 6):
        log.append(step=step, loss=float(step))
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')
    log.truncate(3)
    log.append(step=4, loss=0.5)
    log.sync()
    assert [(entry["step"], entry["loss"]) for entry in log.entries()] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]
