"""A model, batches and plans for one of several processes, and what is counted there."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from steps import QUICK
from torch import nn

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


def within(applied, loss, args):
    with applied:
        return loss(*args)


def least_peak(step, *args):
    """gloo's own thread lets go of a reduced tensor a moment after whoever waits has gone on: more in some steps."""
    return min(remat.torch.measure(step, *args, repeats=1).peak_bytes for _ in range(10))


# What PyTorch before 2.13 calls them.
EARLIER_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


@contextmanager
def counted():
    """Counts the collectives that FSDP starts."""
    calls = []

    def counting(name):
        place = name if hasattr(dist, name) else EARLIER_NAMES[name]
        own = getattr(dist, place)
        return mock.patch.object(dist, place, lambda *a, **k: (calls.append(name), own(*a, **k))[1])

    with counting("all_gather_single"), counting("reduce_scatter_single"), counting("all_reduce"):
        yield calls


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
