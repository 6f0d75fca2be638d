"""Steps under ``fully_shard`` in graph mode, in one of several processes, against the plain steps."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from rank_steps import Block, batch, counted, least_peak, local, model, same
from steps import QUICK
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import remat
import remat.torch

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


class Tokens(nn.Module):
    """A small language model."""

    def __init__(self, tied=True, width=64, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(rank, rows=512):
    found = torch.randint(50, (rows,), generator=torch.Generator().manual_seed(rank))
    return found, found * 7 % 50


def sharded(module, blocks, policy=None, inside=None, **options):
    """Each block and the whole under ``fully_shard``."""
    for block in blocks:
        fully_shard(block, mp_policy=inside or policy or MixedPrecisionPolicy(), **options)
    return fully_shard(module, mp_policy=policy or MixedPrecisionPolicy(), **options)


def of_tokens(**options):
    module = Tokens(tied=options.pop("tied", True))
    return sharded(module, module.blocks, **options)


def cross_entropy(module, x, y):
    return nn.functional.cross_entropy(module(x).float(), y)


def three_updates(module, optimizer, loss, args):
    for _ in range(3):
        value = loss(*args)
        value.backward()
        yield value.detach()
        optimizer.step()
        optimizer.zero_grad()


def in_turns(make, args, budget="60%", train=three_updates, loss_of=cross_entropy, **options):
    """The same training plain and in graph mode: weights, losses and collectives, the plans, and peaks."""
    options = {"mode": "graph", **options}
    said = _Said()
    logging.getLogger("remat").addHandler(said)
    found, peaks = [], []
    for is_limited in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = make()
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-3)
        loss = lambda *a: loss_of(module, *a)  # noqa: B023, E731
        if is_limited:
            loss = remat.torch.limit_memory(loss, budget, **options, **QUICK)
        torch.manual_seed(7)
        with counted() as calls:
            numbers = list(train(module, optimizer, loss, args))
        weights = {name: local(p).detach().clone() for name, p in module.named_parameters()}
        found.append((weights, numbers, Counter(calls)))

        def step(*args):
            loss(*args).backward()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        peaks.append(least_peak(step, *args))
    logging.getLogger("remat").removeHandler(said)
    (plain, plain_numbers, plain_calls), (planned, numbers, calls) = found
    return {
        "same": same(plain, planned) and len(numbers) > 0,
        "same_losses": all(torch.equal(a, b) for a, b in zip(plain_numbers, numbers, strict=True)),
        "calls": [plain_calls, calls],
        "modes": [plan.mode for plan in loss.plans],
        "plans": [[p.recomputed, p.peak_bytes, p.measured_peak_bytes, p.budget_bytes] for p in loss.plans],
        "largest_exchange": max((exchanged_bytes(one.graph) for one in loss.plans if one.mode == "graph"), default=0),
        "peaks": peaks,
        "said": said.messages,
    }


def exchanged_bytes(graph):
    """The most bytes that one gather makes, or one reduction sends; the latter may be wider than parameters are."""
    exchanged = ("gather", "take_gradients")
    return max(graph.tensors[number].size_bytes for op in graph.ops if op.kind in exchanged for number in op.outputs)


class _Said(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def least(make, args, **options):
    """Within the smallest budget that an error names."""
    try:
        return in_turns(make, args, budget="10%", **options)
    except remat.InfeasibleBudget as error:
        return in_turns(make, args, budget=error.minimum_bytes, **options)


def graph(rank, reshard=True, whole=False, mixed=False, mesh=None, budget="60%"):
    """By blocks or whole, parameters gathered again or not, in single precision or half of it."""
    mesh = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("data", "fsdp"))

    def make():
        module = model()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
        return sharded(module, () if whole else module, policy, reshard_after_forward=reshard, mesh=mesh)

    return in_turns(make, batch(rank, rows=1024), budget=budget)


def heavy(rank, policy=None):
    """Weights dominate, so that the peak lies where they are gathered or their gradients are reduced."""
    inside = None if policy is None else MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def make():
        wide = [nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(4)]
        module = nn.Sequential(*wide, nn.Linear(256, 4))
        return sharded(module, wide, policy, inside)

    return least(make, batch(rank, rows=64, width=256))


def frozen(rank):
    def make():
        module = Tokens(tied=False)
        for parameter in (module.embed.weight, *module.blocks[0].parameters(), module.blocks[1].one.weight):
            parameter.requires_grad_(False)
        return sharded(module, module.blocks)

    return in_turns(make, tokens(rank), budget="75%")


def without_root(rank):
    def make():
        module = Tokens(tied=False)
        for block in module.blocks:
            fully_shard(block)
        return module

    return in_turns(make, tokens(rank))


def two_modules(rank):
    """The embedding and the head with its weight, which are gathered together."""

    def make():
        module = Tokens()
        for block in module.blocks:
            fully_shard(block)
        fully_shard([module.embed, module.head])
        return fully_shard(module)

    return in_turns(make, tokens(rank))


def uneven(rank):
    """Rank 1 has less of each matrix."""

    def make():
        module = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33), nn.Tanh(), nn.Linear(33, 5))
        return sharded(module, (module[0], module[2]))

    return least(make, batch(rank, rows=1024, width=33))


def reduced_once(module, optimizer, loss, args):
    for _ in range(2):
        for step in range(3):
            module.set_requires_gradient_sync(step == 2)
            value = loss(*args)
            value.backward()
            yield value.detach()
        optimizer.step()
        optimizer.zero_grad()


def in_all_ways(module, optimizer, loss, args):
    """Evaluation, fewer rows, two forward passes, weights read in between, a graph that stays, a clipped norm."""

    def update(value, *more):
        value.backward(*more)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    few = [one[:256] for one in args]
    yield update(loss(*args))
    module.eval()
    yield update(loss(*args))
    with torch.no_grad():
        yield loss(*args)
    module.train()
    yield update(loss(*few))
    yield update(loss(*args) + loss(*args))
    value = loss(*args)
    state = module.state_dict()
    yield sum(local(one).double().sum() for one in state.values())
    yield update(value)
    value = loss(*args)
    value.backward(retain_graph=True)
    yield update(value)
    value = loss(*args)
    value.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    loss(*few).detach()  # No backward pass: what it gathered is old after the next update.
    yield update(loss(*few))
    loss(*few).detach()
    optimizer.step()
    yield update(loss(*args))


def several_calls(module, optimizer, loss, args):
    """Of two calls under one backward pass, some leave their gradients whole."""
    few = [one[:256] for one in args]
    for _ in range(2):
        for step in range(3):
            module.set_requires_gradient_sync(step == 2)
            value = loss(*args) + loss(*few)
            value.backward()
            yield value.detach()
        optimizer.step()
        optimizer.zero_grad()


def cases(rank):
    """What may be special about a step, one after the other."""
    accumulates = {"budget": "80%", "train": reduced_once}
    return {
        "tied": in_turns(of_tokens, tokens(rank)),
        "heavy": heavy(rank),
        "heavy_mixed": heavy(rank, HALF),
        "frozen": frozen(rank),
        "without_root": without_root(rank),
        "two_modules": two_modules(rank),
        "uneven": uneven(rank),
        "reduced_once": in_turns(of_tokens, tokens(rank), **accumulates),
        "reduced_once_mixed": in_turns(
            lambda: of_tokens(policy=HALF, inside=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
            tokens(rank),
            **accumulates,
        ),
        "in_all_ways": in_turns(of_tokens, tokens(rank), train=in_all_ways),
        "several_calls": in_turns(of_tokens, tokens(rank), train=several_calls, budget="80%"),
    }


def one_cannot(rank):
    """Rank 1 alone meets what cannot be captured."""

    def loss_of(module, x, y):
        found = module(x)
        if rank == 1:
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(found, y)

    return in_turns(of_tokens, tokens(rank), budget="80%", loss_of=loss_of)


def others_rows(rank):
    """Rank 1 has more rows."""
    try:
        in_turns(of_tokens, tokens(rank, 512 + 64 * rank))
    except remat.PlanMismatch as error:
        return {"error": str(error)}
    return {"error": ""}


SCENARIOS = {
    "sharded_graph": graph,
    "sharded_graph_tight": lambda rank: graph(rank, budget="40%"),
    "sharded_graph_kept": lambda rank: graph(rank, reshard=False),
    "sharded_graph_whole": lambda rank: graph(rank, whole=True),
    "sharded_graph_mixed": lambda rank: graph(rank, mixed=True),
    "sharded_graph_mixed_kept": lambda rank: graph(rank, mixed=True, reshard=False),
    "sharded_graph_whole_mixed": lambda rank: graph(rank, whole=True, mixed=True),
    "sharded_graph_replicated": lambda rank: graph(rank, mesh=(2, 2)),
    "sharded_graph_cases": cases,
    "sharded_graph_one_cannot": one_cannot,
    "sharded_graph_others_rows": others_rows,
}
