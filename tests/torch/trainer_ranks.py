"""Other people's trainers in one of several processes, as torchrun starts them."""

from __future__ import annotations

import os

import torch.distributed as dist
from rank_steps import counted


def trained_by(rank, trainer, **kinds):
    """What a trainer comes to, plain and within a budget; each wraps the model in DistributedDataParallel.

    Args:
        rank: of this process.
        trainer: a function of ``trainers_worker``.
        kinds: its arguments.
    """
    return getattr(as_torchrun_starts_them(rank), trainer)(**kinds) | {"processes": dist.get_world_size()}


def accelerate_fsdp(rank, accumulation=1):
    """Accelerate's FSDP2 plug-in; with accumulation it reduces gradients in the last micro-batch only."""
    return as_torchrun_starts_them(rank).accelerate_fsdp(accumulation, counted)


def as_torchrun_starts_them(rank):
    import trainers_worker

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # The group is there already.
    return trainers_worker
