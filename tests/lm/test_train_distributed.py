"""Runs on several processes (gloo, on the CPU): the same losses as on one, and resuming on another number of them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stochastic_attention.lm.checkpoints import newest_checkpoint
from stochastic_attention.lm.train import train
from stochastic_attention.lm.train_config import read_config

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture
def launch(config_file, tmp_path):
    """launch(output, processes, *settings): run `sattn train` to its end, as torchrun would start it."""
    path = config_file()

    def launch(output, processes, *settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, str(WORKER), "train", "--config", str(path), "--output", str(tmp_path / output)]
        command += ["--cache", str(tmp_path / "data"), *(f"--set={setting}" for setting in settings)]
        shared = {
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        running = []
        for rank in range(processes):
            variables = {k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            running.append(
                subprocess.Popen(
                    command,
                    env=os.environ | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=300)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        for process, output in zip(running, said, strict=True):
            assert process.returncode == 0, output

    return launch


def told(folder):
    """Loss and norm of the gradient of every step, and the losses of validation."""
    entries = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    validations = [json.loads(line)["loss"] for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert len(validations) == 3
    return torch.tensor([*(e["loss"] for e in entries), *(e["grad_norm"] for e in entries), *validations])


def assert_same(one, other):
    """Up to rounding: processes sum a batch's gradients in another order, which Adam's first steps magnify."""
    torch.testing.assert_close(told(one), told(other), rtol=1e-4, atol=1e-5)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def cut(folder, step):
    """Take a finished run back to the checkpoint of a step."""
    (folder / "record.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
    assert newest_checkpoint(folder / "checkpoints").name == f"checkpoint-{step}"


@pytest.fixture
def run_alone(config_file, tmp_path):
    """run_alone(output): the run in this process."""
    return lambda output: train(read_config(config_file(), []), tmp_path / output, command="", cache=tmp_path / "data")


def test_two_processes_have_the_losses_of_one_and_one_goes_on_from_two(launch, run_alone, tmp_path):
    run_alone("one")
    launch("run", 2, "training.parallel=ddp")
    assert_same(tmp_path / "one", tmp_path / "run")
    cut(tmp_path / "run", 4)
    assert run_alone("run").resumed_from == 4
    assert_same(tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("first", "then"), [(2, 2), (1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(launch, run_alone, tmp_path, parallel, first, then):
    run_alone("one")
    launch("run", first, f"training.parallel={parallel}", "training.micro_batch=1")
    is_sharded = (tmp_path / "run" / "checkpoints" / "checkpoint-4" / "pytorch_model_fsdp.bin").exists()
    assert is_sharded == (parallel == "fsdp2")
    assert_same(tmp_path / "one", tmp_path / "run")
    cut(tmp_path / "run", 4)
    launch("run", then, f"training.parallel={parallel}", "training.micro_batch=2")
    assert_same(tmp_path / "one", tmp_path / "run")
