"""One of two processes with gloo: ``python two_processes.py RANK FILE SCENARIO`` prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from steps import QUICK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
import remat.torch


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.norm(x + self.dropout(self.two(torch.tanh(self.one(x)))))


def model(width=64, blocks=6, batch_norm=False):
    torch.manual_seed(0)
    ends = [nn.BatchNorm1d(width)] if batch_norm else []
    return nn.Sequential(*[Block(width) for _ in range(blocks)], *ends, nn.Linear(width, 4))


def batch(rank, rows=128, width=64):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, width, generator=generator), torch.randint(4, (rows,), generator=generator)


def planned(loss, args, **options):
    try:
        return remat.torch.plan(loss, *args, budget="60%", **QUICK, **options)
    except remat.InfeasibleBudget as error:
        return remat.torch.plan(loss, *args, budget=error.minimum_bytes, **QUICK, **options)


def gradients(module):
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        found[name] = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.zero_grad()
    return found | buffers


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def ddp(rank):
    """Plain, under a plan, and in micro-batches; how often gradients are reduced."""
    args = batch(rank)
    calls = []

    def wrapped():
        module = DistributedDataParallel(model(batch_norm=True))
        module.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(None, bucket))[1])
        return module, lambda x, y: nn.functional.cross_entropy(module(x), y)

    def run(context, module, loss):
        calls.clear()
        torch.manual_seed(7)
        for _ in range(3):
            module.zero_grad()
            if context is None:
                value = loss(*args)
            else:
                with context:
                    value = loss(*args)
            value.backward()
        return gradients(module), len(calls)

    module, loss = wrapped()
    plain, plain_calls = run(None, module, loss)
    module, loss = wrapped()
    plan = planned(loss, args)
    applied = remat.torch.apply(plan)
    found, found_calls = run(applied, module, loss)
    peak = remat.torch.measure(lambda *a: within(applied, loss, a), *args, repeats=1).peak_bytes
    return {
        "same": same(plain, found),
        "calls": [plain_calls, found_calls],
        "recomputed": plan.recomputed,
        "departures": applied.departures,
        "peak": [plan.peak_bytes, peak, plan.budget_bytes],
    }


def ddp_graph(rank):
    """As ``ddp``, in graph mode: the wrapped module captured whole, and its reducer's hooks."""
    args = batch(rank)
    calls = []

    def wrapped():
        torch._dynamo.reset()
        module = DistributedDataParallel(model(batch_norm=True))
        module.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(None, bucket))[1])
        return module, lambda x, y: nn.functional.cross_entropy(module(x), y)

    def run(module, loss):
        calls.clear()
        torch.manual_seed(7)
        for _ in range(3):
            module.zero_grad()
            loss(*args).backward()
        return gradients(module), len(calls)

    plain, plain_calls = run(*wrapped())
    module, loss = wrapped()
    captured = remat.torch.compile(loss, budget="80%", backend="aten", **QUICK)
    found, found_calls = run(module, captured)
    peak = remat.torch.measure(captured, *args, repeats=1).peak_bytes
    return {
        "same": same(plain, found),
        "calls": [plain_calls, found_calls],
        "recomputed": captured.plan.recomputed,
        "mode": captured.plan.mode,
        "plans": len(captured.plans),
        "reason": captured.reason,
        "peak": [captured.plan.peak_bytes, peak, captured.plan.budget_bytes],
    }


def within(applied, loss, args):
    with applied:
        return loss(*args)


def ddp_micro_batches(rank):
    """A batch in parts, reduced once, against the whole batch."""
    args = batch(rank, rows=1024)
    torch.manual_seed(0)
    module = DistributedDataParallel(model())
    module.eval()  # Dropout draws for each part.
    calls = []
    module.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(None, bucket))[1])
    loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: E731
    loss(*args).backward()
    whole, whole_calls = gradients(module), len(calls)
    calls.clear()
    step = remat.torch.micro_batches(loss, 4, budget="60%", no_sync=module.no_sync, **QUICK)
    step(*args)
    parts = gradients(module)
    largest = max(float((whole[n] - parts[n]).abs().max() / whole[n].abs().max()) for n in whole)
    return {"difference": largest, "calls": [whole_calls, len(calls)]}


@contextmanager
def counted():
    """Counts the collectives that FSDP starts."""
    calls = []

    def counting(name):
        own = getattr(dist, name)
        return mock.patch.object(dist, name, lambda *a, **k: (calls.append(name), own(*a, **k))[1])

    with counting("all_gather_single"), counting("reduce_scatter_single"):
        yield calls


def fsdp(rank, reshard):
    """fully_shard on each block and on the whole."""
    args = batch(rank, rows=1024)

    def sharded():
        module = model()
        for block in module:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(module, reshard_after_forward=reshard)
        return module, lambda x, y: nn.functional.cross_entropy(module(x), y)

    def run(context, module, loss):
        torch.manual_seed(7)
        with counted() as calls:
            for _ in range(2):
                module.zero_grad()
                value = loss(*args) if context is None else within(context, loss, args)
                value.backward()
        return gradients(module), calls

    module, loss = sharded()
    plain, plain_calls = run(None, module, loss)
    plain_peak = remat.torch.measure(loss, *args, repeats=1).peak_bytes
    whole = model()
    whole_loss = lambda x, y: nn.functional.cross_entropy(whole(x), y)  # noqa: E731
    beside = plain_peak - planned(whole_loss, args).baseline_peak_bytes
    plan = planned(whole_loss, args, resident_bytes=beside)
    applied = remat.torch.apply(plan)
    module, loss = sharded()
    found, found_calls = run(applied, module, loss)
    peak = remat.torch.measure(lambda *a: within(applied, loss, a), *args, repeats=1).peak_bytes
    return {
        "same": same(plain, found),
        "calls": [Counter(plain_calls), Counter(found_calls)],
        "recomputed": plan.recomputed,
        "departures": applied.departures,
        "peak": [plan.peak_bytes, peak, plan.budget_bytes],
    }


SCENARIOS = {
    "ddp": ddp,
    "ddp_graph": ddp_graph,
    "ddp_micro_batches": ddp_micro_batches,
    "fsdp": lambda rank: fsdp(rank, reshard=False),
    "fsdp_reshard": lambda rank: fsdp(rank, reshard=True),
}

if __name__ == "__main__":
    rank, file, scenario = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    print(json.dumps(SCENARIOS[scenario](rank)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
