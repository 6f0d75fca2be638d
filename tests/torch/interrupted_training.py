"""One of two processes that train and write checkpoints, of which the test kills one in the midst of a step.

``python interrupted_training.py RANK STORE ENGINE FOLDER LAST_STEP STOP_AT`` trains up to a step, from the newest
checkpoint in the folder. In step ``STOP_AT`` (-1 for none) rank 1 writes ``in_the_step`` and waits to be killed.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_steps import batch, model
from steps import QUICK
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat.torch

ENGINE_TIMEOUT = timedelta(seconds=30)


def made(engine):
    module = model()
    if engine == "ddp":
        return DistributedDataParallel(module)
    for block in module:
        fully_shard(block)
    return fully_shard(module)


def own_part(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def parts(module, optimizer):
    """What this process holds of the weights and of the optimizer's state, in a fixed order."""
    weights = [own_part(p).detach() for p in module.parameters()]
    state = [own_part(value) for p in module.parameters() for _, value in sorted(optimizer.state[p].items())]
    return weights, state


def main(rank, engine, folder, last_step, stop_at):
    module = made(engine)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    checkpoint = folder / f"checkpoint-{rank}.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # It makes the state that the checkpoint fills.
        optimizer.zero_grad()
        with torch.no_grad():
            weights, state = parts(module, optimizer)
            for now, before in zip([*weights, *state], [*saved["weights"], *saved["state"]], strict=True):
                now.copy_(before)
        first = saved["step"]

    def loss_of(x, y):
        return nn.functional.cross_entropy(module(x), y)

    step_loss = remat.torch.limit_memory(loss_of, "70%", mode="eager", **QUICK)
    x, y = batch(rank, rows=256)
    for step in range(first, last_step):
        torch.manual_seed(step)
        loss = step_loss(x, y)
        if step == stop_at and rank == 1:
            (folder / "in_the_step").touch()
            time.sleep(600)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, state = parts(module, optimizer)
        torch.save({"weights": weights, "state": state, "step": step + 1}, folder / f"new-{rank}.pt")
        (folder / f"new-{rank}.pt").replace(checkpoint)


if __name__ == "__main__":
    rank, store, engine, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=ENGINE_TIMEOUT)
    main(rank, engine, folder, int(sys.argv[5]), int(sys.argv[6]))
    dist.destroy_process_group()
