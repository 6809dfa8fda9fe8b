"""`sattn` as one of several processes on the CPU: python distributed_worker.py ARGUMENTS, under torchrun's variables.

accelerate shards parameters (FSDP) over accelerators alone, and on a CPU falls back to copies without a word. Here it
is made to shard there too, so that a machine without a GPU tests all but the kernels.
"""

import sys

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from stochastic_attention import cli
from stochastic_attention.lm.trainer import StochasticTrainer

create = StochasticTrainer.create_accelerator_and_postprocess
evaluate = StochasticTrainer.evaluate


def create_and_shard(trainer):
    create(trainer)
    if trainer.args.fsdp:
        plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        trainer.is_fsdp_enabled = True


def evaluate_shards(trainer, *args, **kwargs):
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters()) == bool(trainer.args.fsdp)
    return evaluate(trainer, *args, **kwargs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    StochasticTrainer.create_accelerator_and_postprocess = create_and_shard
    StochasticTrainer.evaluate = evaluate_shards
    sys.exit(cli.main(sys.argv[1:]))
