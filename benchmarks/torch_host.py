"""What ``remat.torch.apply`` costs the host, per operator and per recomputation: ``python -m benchmarks.torch_host``.

A chain of 100 layers of 16 units, whose kernels take a few microseconds. Prints the least processor time of many steps,
taken in turns, for plain PyTorch, for a mode and hooks of PyTorch's own that do nothing, for a plan that recomputes
nothing, and for the smallest plan, which recomputes each operator several times.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
import remat.torch

LAYERS, UNITS, BATCH, STEPS = 100, 16, 256, 60


class Nothing(TorchDispatchMode):
    """Sees each operator, and does nothing about it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def mode_and_hooks() -> Any:
    """The least that a program pays that sees each operator and each tensor that autograd saves."""
    with Nothing(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def table(device: str = "cpu") -> list[dict[str, Any]]:
    """A line for each way to run the chain: microseconds of the host per operator, forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(UNITS, UNITS), nn.Tanh())]).to(device)
    x = torch.randn(BATCH, UNITS, device=device)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    everything = remat.torch.plan(loss_fn, x, budget="100%", time_limit_s=2)
    smallest = remat.torch.plan(loss_fn, x, budget=least_bytes(loss_fn, x), time_limit_s=2)
    kept, again = remat.torch.apply(everything), remat.torch.apply(smallest)
    contexts = {
        "plain": contextlib.nullcontext,
        "a mode and hooks that do nothing": mode_and_hooks,
        "apply, nothing recomputed": lambda: kept,
        f"apply, {smallest.recomputed} recomputations": lambda: again,
    }
    ops = everything.step.recording.forward_ops
    least = {name: (float("inf"), float("inf")) for name in contexts}
    gc.disable()
    for _ in range(STEPS):
        for name, context in contexts.items():
            model.zero_grad()
            started = time.process_time()
            with context():
                loss = loss_fn(x)
            between = time.process_time()
            loss.backward()
            ended = time.process_time()
            least[name] = (min(least[name][0], between - started), min(least[name][1], ended - between))
        gc.collect()
    gc.enable()
    lines = [
        {"name": name, "ops": ops, "forward_us": forward_s / ops * 1e6, "backward_us": backward_s / ops * 1e6}
        for name, (forward_s, backward_s) in least.items()
    ]
    *_, first, last = map(sum, least.values())
    each_us = (last - first) / smallest.recomputed * 1e6
    return [*lines, {"name": "each recomputation", "ops": smallest.recomputed, "backward_us": each_us}]


def main() -> None:
    lines = table()
    print(f"{lines[0]['ops']} operators in the forward pass; us per operator, forward and backward")
    for line in lines:
        print(f"{line['name']:40s}{line.get('forward_us', 0.0):8.1f}{line['backward_us']:8.1f}")


def least_bytes(loss_fn: Any, x: torch.Tensor) -> int:
    """The smallest budget that a plan is found for."""
    try:
        remat.torch.plan(loss_fn, x, budget=1, time_limit_s=2)
    except remat.InfeasibleBudget as error:
        return error.minimum_bytes
    return 1


if __name__ == "__main__":
    main()
