"""Steps of one of several processes on a mesh: tensor parallelism, and what a simulated mesh predicted for them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from rank_steps import batch, least_peak, local, model, planned, same, within
from steps import QUICK
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.debug import CommDebugMode

import remat.torch

STYLES = {"*.one": "colwise", "*.two": "rowwise"}


def in_sequence(module, mesh):
    """Cut the rows of what stands between the matrices, too, and send what that takes."""
    sharded, whole = Shard(0), Replicate()
    for block in module[:-1]:
        cuts = {
            "one": parallel.ColwiseParallel(input_layouts=sharded),
            "two": parallel.RowwiseParallel(output_layouts=sharded),
            "norm": parallel.SequenceParallel(sequence_dim=0, use_local_output=True),
        }
        parallel.parallelize_module(block, mesh, cuts)
    for layer, given, wanted in ((module[0], whole, sharded), (module[-1], sharded, whole)):
        layouts = {"input_layouts": (given,), "desired_input_layouts": (wanted,)}
        parallel.parallelize_module(layer, mesh, parallel.PrepareModuleInput(**layouts, use_local_output=True))


def cut_matrices(module, mesh=None):
    cuts = {name: parallel.ColwiseParallel() for name, _ in module.named_modules() if name.endswith("one")}
    cuts |= {name: parallel.RowwiseParallel() for name, _ in module.named_modules() if name.endswith("two")}
    parallel.parallelize_module(module, mesh or init_device_mesh("cpu", (2,)), cuts)


def tensor(rank, cut=cut_matrices, shards=1, limited=False, autocast=False):
    """Matrices cut over processes (and what remains of each over others), plain and under a plan."""
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("fsdp", "tensor"))
    args = batch(mesh.get_local_rank("fsdp"), rows=1024)

    def step_of():
        module = model()
        cut(module, mesh["tensor"])
        if shards > 1:
            for block in module:
                fully_shard(block, mesh=mesh["fsdp"])
            fully_shard(module, mesh=mesh["fsdp"])
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)

        def loss(x, y):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return nn.functional.cross_entropy(local(module(x)).float(), y)

        return module, optimizer, loss

    def run(context, module, optimizer, loss):
        torch.manual_seed(7)
        for _ in range(2):
            within(context, loss, args).backward()
            optimizer.step()
            optimizer.zero_grad()
        with CommDebugMode() as seen:
            within(context, loss, args).backward()
        optimizer.zero_grad()
        calls = {str(kind): count for kind, count in seen.get_comm_counts().items()}
        return {name: local(p).detach().clone() for name, p in module.named_parameters()}, calls

    def peak(context, optimizer, loss):
        def step(*a):
            within(context, loss, a).backward()
            optimizer.zero_grad()

        return least_peak(step, *args)

    module, optimizer, loss = step_of()
    plain, plain_calls = run(nullcontext(), module, optimizer, loss)
    plain_peak = peak(nullcontext(), optimizer, loss)
    module, optimizer, loss = step_of()
    if limited:
        loss = remat.torch.limit_memory(loss, "65%", **QUICK)
        found, found_calls = run(nullcontext(), module, optimizer, loss)
        (plan,) = loss.plans
        planned_peak, departures = peak(nullcontext(), optimizer, loss), 0
    else:
        plan = planned(loss, args)
        applied = remat.torch.apply(plan)
        found, found_calls = run(applied, module, optimizer, loss)
        planned_peak, departures = peak(applied, optimizer, loss), applied.departures
    return {
        "same": same(plain, found),
        "calls": [plain_calls, found_calls],
        "recomputed": plan.recomputed,
        "departures": departures,
        "mode": plan.mode,
        "plain": [plan.baseline_peak_bytes, plain_peak],
        "peak": [plan.peak_bytes, planned_peak, plan.budget_bytes],
        "measured": plan.measured_peak_bytes,
    }


def on_mesh(rank, cut, mesh):
    """What a step on a mesh was predicted to need, and what it needs.

    Args:
        rank: of this process.
        cut: distributes a model with memory over the real mesh.
        mesh: as ``plan_mesh`` takes it.
    """
    module = blocks_and_head()
    cut(module)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    x, y = batch(rank, rows=1024)

    def loss():
        return nn.functional.cross_entropy(module(x), y)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(7)
    step()
    measured = least_peak(step)
    dist.destroy_process_group()  # The mesh is simulated in this very process.

    def build(rows):
        with torch.device("meta"):
            simulated = blocks_and_head()
            args = torch.empty(rows, 64), torch.empty(rows, dtype=torch.int64)
        return lambda x, y: nn.functional.cross_entropy(simulated(x), y), *args

    given = {"device": "cpu", "budget": "1GiB", "batch_size": 1024 * (2 if mesh == "fsdp=2" else 1), "styles": STYLES}
    found = remat.torch.plan_mesh(build, mesh, reshard_after_forward=True, **given)
    return {"predicted": found.plan.peak_bytes, "measured": measured}


def shard_blocks(module):
    blocks, head = module
    for unit in (*blocks, head):
        fully_shard(unit, reshard_after_forward=True)
    fully_shard(module)


def blocks_and_head():
    *blocks, head = model()
    return nn.Sequential(nn.Sequential(*blocks), head)
