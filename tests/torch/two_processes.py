"""One of several processes with gloo: ``two_processes.py RANK FILE SCENARIO [RANKS]`` prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from steps import QUICK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import remat
import remat.torch

EAGERLY = {"mode": "eager", **QUICK}


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


def least_peak(step, *args):
    """gloo's own thread lets go of a reduced tensor a moment after whoever waits has gone on: more in some steps."""
    return min(remat.torch.measure(step, *args, repeats=1).peak_bytes for _ in range(5))


@contextmanager
def counted():
    """Counts the collectives that FSDP starts."""
    calls = []

    def counting(name):
        own = getattr(dist, name)
        return mock.patch.object(dist, name, lambda *a, **k: (calls.append(name), own(*a, **k))[1])

    with counting("all_gather_single"), counting("reduce_scatter_single"), counting("all_reduce"):
        yield calls


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
    return {
        "same": same(plain, found) and untouched,
        "calls": [Counter(plain_calls), Counter(found_calls)],
        "recomputed": plan.recomputed,
        "departures": applied.departures,
        "plain": [plain_plan.baseline_peak_bytes, plain_peak],
        "peak": [plan.peak_bytes, peak(applied, optimizer, loss), plan.budget_bytes],
        "measured": plan.measured_peak_bytes,
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
    """A step under fully_shard with one line: limit_memory cannot capture it, and plans it as it is."""
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


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


STYLES = {"*.one": "colwise", "*.two": "rowwise"}


def shard_blocks(module):
    blocks, head = module
    for unit in (*blocks, head):
        fully_shard(unit, reshard_after_forward=True)
    fully_shard(module)


def blocks_and_head():
    *blocks, head = model()
    return nn.Sequential(nn.Sequential(*blocks), head)


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


def hugging_face(rank):
    """Hugging Face's Trainer as torchrun starts it; it wraps the model in DistributedDataParallel."""
    return trainers_as_torchrun_starts_them(rank).hugging_face(accumulation=2, metrics=True) | {
        "processes": dist.get_world_size()
    }


def accelerate_fsdp(rank, accumulation=1):
    """Accelerate's FSDP2 plug-in; with accumulation it reduces gradients in the last micro-batch only."""
    return trainers_as_torchrun_starts_them(rank).accelerate_fsdp(accumulation, counted)


def trainers_as_torchrun_starts_them(rank):
    import trainers_worker

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # The group is there already.
    return trainers_worker


SCENARIOS = {
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
    "hugging_face": hugging_face,
    "accelerate_fsdp": accelerate_fsdp,
    "accelerate_fsdp_accumulates": lambda rank: accelerate_fsdp(rank, accumulation=3),
    "ranks_disagree": ranks_disagree,
    "one_plan": one_plan,
}

if __name__ == "__main__":
    rank, file, scenario = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ranks = int(sys.argv[4]) if sys.argv[4:] else 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    print(json.dumps(SCENARIOS[scenario](rank)), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
