"""A swapped model on several processes (gloo, on the CPU): routing reads neither the rank nor the global generator."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from stochastic_attention.hf import swap

WORKER = Path(__file__).with_name("distributed_worker.py")
spec = importlib.util.spec_from_file_location(WORKER.stem, WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

ROWS, RANKS = 4, 2


@pytest.fixture
def rows():
    return torch.randint(1, 64, (ROWS, 21), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def ranks(make_model, rows, tmp_path):
    """What each of two ranks found."""
    make_model().save_pretrained(tmp_path)
    torch.save(rows, tmp_path / "ids.pt")
    commands = [[sys.executable, str(WORKER), str(tmp_path), str(rank), str(RANKS)] for rank in range(RANKS)]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, said, strict=True):
        assert process.returncode == 0, output
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]


def test_two_ranks_do_what_one_process_does(make_model, rows, ranks):
    """Same logits, and DistributedDataParallel's losses and gradients are those of one process on all rows."""
    expected = worker.logits(swap(make_model(), worker.PATTERN), rows)
    for rank, found in enumerate(ranks):
        assert torch.equal(found["whole"], expected), "a rank's number and random state change no routing"
        torch.testing.assert_close(found["share"], expected[rank::RANKS], rtol=1e-4, atol=1e-4)
    for name, layers in worker.LAYERS.items():
        alone = worker.train(swap(make_model(), worker.PATTERN, layers).train(), rows)
        losses = torch.tensor([found[name]["losses"] for found in ranks])
        torch.testing.assert_close(losses.mean(0), torch.tensor(alone["losses"]), rtol=1e-5, atol=1e-5)
        for found in ranks:
            for step in range(2):
                gradients = found[name]["gradients"][step]
                assert all(grad is not None and grad.abs().max() > 0 for grad in gradients)
                torch.testing.assert_close(gradients, alone["gradients"][step], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
def test_logits_depend_on_neither_rank_nor_world_size(make_model, rows, rank, world_size):
    model = swap(make_model(), worker.PATTERN)
    expected = worker.logits(model, rows)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        assert dist.get_rank() == rank
        assert torch.equal(worker.logits(model, rows), expected)
        assert torch.equal(worker.logits(swap(make_model(), worker.PATTERN), rows), expected)
    finally:
        dist.destroy_process_group()
