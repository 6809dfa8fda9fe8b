"""One rank of tests/hf/test_distributed.py: python distributed_worker.py FOLDER RANK WORLD_SIZE.

FOLDER holds the plain model and ids.pt [rows, tokens]; the rank takes its share of the rows and writes RANK.pt there.
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

from stochastic_attention import Pattern
from stochastic_attention.hf import RoutingStep, swap

PATTERN = Pattern.stochastic(4)
LAYERS = {"all layers": None, "one layer": [1]}


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def train(model, ids):
    """Two steps of gradient descent: the loss of each, and the gradients of each."""
    callback, state = RoutingStep(), transformers.TrainerState()
    losses, gradients = [], []
    for state.global_step in range(2):
        callback.on_step_begin(None, state, None, model=model)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        # As they are, so that a parameter without one shows.
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return {"losses": losses, "gradients": gradients}


def main(folder, rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    ids = torch.load(folder / "ids.pt")
    if rank == 1:  # what one rank alone draws must not matter
        torch.rand(3)
        random.random()
    load = transformers.AutoModelForCausalLM.from_pretrained
    found = {"whole": logits(swap(load(folder), PATTERN), ids)}
    found["share"] = logits(swap(load(folder), PATTERN), ids[rank::world_size])
    for name, layers in LAYERS.items():
        parallel = DistributedDataParallel(swap(load(folder), PATTERN, layers), find_unused_parameters=False)
        found[name] = train(parallel.train(), ids[rank::world_size])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
