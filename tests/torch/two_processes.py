"""One of several processes with gloo: ``two_processes.py RANK FILE SCENARIO [RANKS]`` prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from mesh_ranks import cut_matrices, in_sequence, on_mesh, shard_blocks, tensor
from rank_steps import batch, counted, gradients, least_peak, model, planned, same, within
from sharded_ranks import SCENARIOS as IN_GRAPH_MODE
from sharded_ranks import Tokens, tokens
from steps import QUICK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_ranks import accelerate_fsdp, trained_by

import remat
import remat.torch

EAGERLY = {"mode": "eager", **QUICK}


def ddp(rank, **options):
    """Plain, under a plan, and in micro-batches; how often gradients are reduced."""
    args = batch(rank)
    calls = []

    def wrapped():
        module = DistributedDataParallel(model(batch_norm=True), **options)
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


class Products(TorchDispatchMode):
    """Counts the products of matrices that run once a bucket was reduced, and others not yet."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.before = calls, len(calls)
        self.behind_a_reduction = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and len(self.calls) > self.before:
            self.behind_a_reduction += 1
        return func(*args, **(kwargs or {}))


def ddp_graph(rank, **options):
    """As ``ddp``, in graph mode: the wrapped module captured whole, and its reducer's hooks.

    Buckets are small. What lies in one depends on the order in which gradients come, so that numbers are counted.
    """
    args = batch(rank)
    calls = []

    def reduced(state, bucket):
        calls.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    def wrapped():
        torch._dynamo.reset()
        module = DistributedDataParallel(model(batch_norm=True), bucket_cap_mb=0.05, **options)
        module.register_comm_hook(None, reduced)
        return module, lambda x, y: nn.functional.cross_entropy(module(x), y)

    def run(module, loss):
        calls.clear()
        torch.manual_seed(7)
        for _ in range(3):
            module.zero_grad()
            value = loss(*args)
            with Products(calls) as products:
                value.backward()
        return gradients(module), sum(calls), products.behind_a_reduction

    plain, plain_calls, plain_behind = run(*wrapped())
    module, loss = wrapped()
    captured = remat.torch.compile(loss, budget="80%", backend="aten", **QUICK)
    found, found_calls, behind = run(module, captured)
    module.zero_grad()
    peak = remat.torch.measure(captured, *args, repeats=1).peak_bytes
    return {
        "same": same(plain, found),
        "calls": [plain_calls, found_calls],
        "behind": [plain_behind, behind],
        "recomputed": captured.plan.recomputed,
        "mode": captured.plan.mode,
        "plans": len(captured.plans),
        "reason": captured.reason,
        "peak": [captured.plan.peak_bytes, peak, captured.plan.budget_bytes],
    }


def ddp_graph_two_calls(rank):
    """Two calls under one backward pass, as for a contrastive loss, and a tied weight: each bucket is reduced once."""
    one, other = tokens(rank), tokens(rank + 2, rows=448)
    found, reduced = [], []
    for is_captured in (False, True):
        torch.manual_seed(0)
        module = DistributedDataParallel(Tokens(), bucket_cap_mb=0.05)
        calls = []
        module.register_comm_hook(
            None,
            lambda state, bucket: (calls.append(bucket.buffer().numel()), allreduce_hook(None, bucket))[1],  # noqa: B023
        )
        loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: B023, E731
        if is_captured:
            loss = remat.torch.compile(loss, budget="80%", backend="aten", **QUICK)
        for _ in range(3):
            module.zero_grad()
            (loss(*one) + loss(*other)).backward()
        found.append(gradients(module))
        reduced.append(sum(calls))
    return {"same": same(*found), "calls": reduced, "mode": loss.plan.mode}


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


def ddp_graph_micro_batches(rank):
    """The same in graph mode, with sums that are divided at the end, against eager micro-batches."""
    args = batch(rank, rows=1024)
    found, reduced = [], []
    for backend in (None, "aten"):
        module = DistributedDataParallel(model())
        module.eval()
        calls = []
        module.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(None, bucket))[1])  # noqa: B023
        loss = lambda x, y: (nn.functional.cross_entropy(module(x), y, reduction="sum"), torch.tensor(float(len(y))))  # noqa: B023, E731
        if backend is not None:
            loss = remat.torch.compile(loss, budget="100%", backend=backend, accumulates=True)
        step = remat.torch.micro_batches(loss, 4, reduction="ratio", no_sync=module.no_sync)
        for _ in range(2):
            step(*args)
        found.append(gradients(module))
        reduced.append(len(calls))
    return {"same": same(*found), "calls": reduced, "mode": loss.plan.mode}


def first_step_bytes(loss, args, optimizer):
    """What the first step under a plan is measured at; as for ``least_peak``, a gathered parameter more in some."""
    plan = planned(loss, args)
    within(remat.torch.apply(plan), loss, args).backward()
    optimizer.zero_grad()
    return plan.measured_peak_bytes


def fsdp(rank, reshard=True, whole=False, mixed=False, mesh=None):
    """fully_shard on each block and on the whole, or on the whole only, and an optimizer's updates."""
    mesh = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("data", "fsdp"))
    args = batch(rank, rows=1024)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()

    def sharded():
        module = model()
        for block in () if whole else module:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        return module, optimizer, lambda x, y: nn.functional.cross_entropy(module(x).float(), y)

    def run(context, module, optimizer, loss):
        torch.manual_seed(7)
        with counted() as calls:
            for _ in range(2):
                value = loss(*args) if context is None else within(context, loss, args)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.to_local().detach().clone() for name, p in module.named_parameters()}, calls

    def peak(context, optimizer, loss):
        def step(*a):
            value = loss(*a) if context is None else within(context, loss, a)
            value.backward()
            optimizer.zero_grad()

        return least_peak(step, *args)

    def state_of(module):
        """The state of the module as users see it, to be the same after it was traced."""
        return {name: (type(p).__name__, id(p), p.grad) for name, p in module.named_parameters()}

    module, optimizer, loss = sharded()
    before = state_of(module)
    plain_plan = planned(loss, args)
    untouched = state_of(module) == before
    plain, plain_calls = run(None, module, optimizer, loss)
    plain_peak = peak(None, optimizer, loss)
    module, optimizer, loss = sharded()
    plan = planned(loss, args)
    applied = remat.torch.apply(plan)
    found, found_calls = run(applied, module, optimizer, loss)
    firsts = [plan.measured_peak_bytes, *(first_step_bytes(loss, args, optimizer) for _ in range(3))]
    return {
        "same": same(plain, found) and untouched,
        "calls": [Counter(plain_calls), Counter(found_calls)],
        "recomputed": plan.recomputed,
        "departures": applied.departures,
        "plain": [plain_plan.baseline_peak_bytes, plain_peak],
        "peak": [plan.peak_bytes, peak(applied, optimizer, loss), plan.budget_bytes],
        "measured": min(firsts),
    }


def fsdp_accumulates(rank, mixed=False, steps=3, mesh=None, over_replicas_only=False):
    """Micro-batches of which only the last reduces gradients, as Accelerate runs them.

    With ``over_replicas_only``, all reduce over the shards, and only the last over the replicas, too.
    """
    mesh = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("data", "fsdp"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    args = batch(rank, rows=1024, width=128)
    found, calls, cycles = [], [], []
    for is_limited in (False, True):
        module = model(width=128)
        for block in module:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        set_flag = module.set_requires_all_reduce if over_replicas_only else module.set_requires_gradient_sync
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        loss = lambda x, y: nn.functional.cross_entropy(module(x).float(), y)  # noqa: B023, E731
        if is_limited:
            loss = remat.torch.limit_memory(loss, "75%", optimizer=optimizer, accumulates=True, **EAGERLY)

        def update(*args):
            for step in range(steps):
                set_flag(step == steps - 1)  # noqa: B023
                loss(*args).backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        torch.manual_seed(7)
        with counted() as one:
            for _ in range(3):
                update(*args)
        calls.append(Counter(one))
        found.append({name: p.to_local().detach().clone() for name, p in module.named_parameters()})
        cycles.append(least_peak(update, *args))
    return {
        "same": same(*found),
        "calls": calls,
        "plans": [[p.recomputed, p.peak_bytes, p.measured_peak_bytes, p.budget_bytes] for p in loss.plans],
        "plain": [max(p.baseline_peak_bytes for p in loss.plans), cycles[0]],
        "peak": cycles[1],
    }


def fsdp_limited(rank):
    """A step under fully_shard with one line: limit_memory captures it."""
    args = batch(rank, rows=1024)
    found = []
    for is_limited in (False, True):
        module = sharded_by_blocks()
        loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: B023, E731
        if is_limited:
            loss = remat.torch.limit_memory(loss, "60%", **QUICK)
        for _ in range(2):
            torch.manual_seed(7)
            loss(*args).backward()
            found.append(gradients(module))
    (plan,) = loss.plans
    return {
        "mode": plan.mode,
        "recomputed": plan.recomputed,
        "same": all(same(found[0], one) for one in found),
        "measured": plan.measured_peak_bytes,
        "budget": plan.budget_bytes,
    }


def sharded_by_blocks():
    module = model()
    for block in module:
        fully_shard(block)
    return fully_shard(module)


def ranks_disagree(rank):
    """Rank 1 has a longer batch."""
    module = sharded_by_blocks()
    loss = remat.torch.limit_memory(lambda x, y: nn.functional.cross_entropy(module(x), y), "60%", **EAGERLY)
    try:
        loss(*batch(rank, rows=256 + 64 * rank))
    except remat.PlanMismatch as error:
        return {"error": str(error)}
    return {"error": ""}


def one_plan(rank):
    """Each rank makes a plan for another budget; both follow rank 0's."""
    args = batch(rank, rows=256)
    found = []
    for share in (None, ("80%", "60%")[rank]):
        module = sharded_by_blocks()
        loss = lambda x, y: nn.functional.cross_entropy(module(x), y)  # noqa: B023, E731
        torch.manual_seed(7)
        if share is None:
            loss(*args).backward()
        else:
            plan = remat.torch.plan(loss, *args, budget=share, **QUICK)
            applied = remat.torch.apply(plan)
            within(applied, loss, args).backward()
        found.append(gradients(module))
    return {
        "same": same(*found),
        "own": list(plan.schedule),
        "followed": list(applied.plan.schedule),
    }


SCENARIOS = {
    "ddp_graph_two_calls": ddp_graph_two_calls,
    "ddp": ddp,
    "ddp_graph": ddp_graph,
    "ddp_graph_bucket_view": lambda rank: ddp_graph(rank, gradient_as_bucket_view=True),
    "ddp_graph_unused": lambda rank: ddp_graph(rank, find_unused_parameters=True),
    "ddp_micro_batches": ddp_micro_batches,
    "ddp_graph_micro_batches": ddp_graph_micro_batches,
    "ddp_bucket_view": lambda rank: ddp(rank, gradient_as_bucket_view=True),
    "fsdp": lambda rank: fsdp(rank, reshard=False),
    "fsdp_reshard": fsdp,
    "fsdp_whole": lambda rank: fsdp(rank, whole=True),
    "fsdp_mixed": lambda rank: fsdp(rank, mixed=True),
    "fsdp_mixed_kept": lambda rank: fsdp(rank, mixed=True, reshard=False),
    "fsdp_whole_mixed": lambda rank: fsdp(rank, mixed=True, whole=True),
    "fsdp_replicated": lambda rank: fsdp(rank, mesh=(2, 2)),
    "fsdp_limited": fsdp_limited,
    "fsdp_accumulates": fsdp_accumulates,
    "fsdp_accumulates_mixed": lambda rank: fsdp_accumulates(rank, mixed=True),
    "fsdp_accumulates_replicated": lambda rank: fsdp_accumulates(rank, mesh=(2, 2)),
    "fsdp_accumulates_over_replicas": lambda rank: fsdp_accumulates(rank, mesh=(2, 2), over_replicas_only=True),
    "fsdp_accumulates_two": lambda rank: fsdp_accumulates(rank, steps=2),
    "tensor": tensor,
    "tensor_autocast": lambda rank: tensor(rank, autocast=True),
    "tensor_sequence": lambda rank: tensor(rank, cut=in_sequence),
    "tensor_fsdp": lambda rank: tensor(rank, shards=2),
    "tensor_limited": lambda rank: tensor(rank, limited=True),
    "mesh_fsdp": lambda rank: on_mesh(rank, shard_blocks, "fsdp=2"),
    "mesh_tensor": lambda rank: on_mesh(rank, cut_matrices, "tensor=2"),
    "hugging_face": lambda rank: trained_by(rank, "hugging_face", accumulation=2, metrics=True),
    "hugging_face_adapters": lambda rank: trained_by(rank, "hugging_face", lora=True),
    "hugging_face_resumed": lambda rank: trained_by(rank, "hugging_face", evaluates=True, resumes=True, best=True),
    "hugging_face_bf16": lambda rank: trained_by(rank, "hugging_face", accumulation=2, bf16=True),
    "lightning": lambda rank: trained_by(rank, "lightning", accumulation=2),
    "accelerate": lambda rank: trained_by(rank, "accelerate", accumulation=2),
    "weight_average": lambda rank: trained_by(rank, "weight_average"),
    "accelerate_fsdp": accelerate_fsdp,
    "accelerate_fsdp_accumulates": lambda rank: accelerate_fsdp(rank, accumulation=3),
    "ranks_disagree": ranks_disagree,
    "one_plan": one_plan,
} | IN_GRAPH_MODE

if __name__ == "__main__":
    rank, file, scenario = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ranks = int(sys.argv[4]) if sys.argv[4:] else 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    print(json.dumps(SCENARIOS[scenario](rank)), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
