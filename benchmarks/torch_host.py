"""What plans cost the host, per operator and per recomputation: ``python -m benchmarks.torch_host``.

A chain of 100 layers of 16 units, whose kernels take a few microseconds. Prints, and keeps in ``benchmarks/results``,
the least processor time of many steps, taken in turns, for plain PyTorch, for a mode and hooks of PyTorch's own that do
nothing, and, under ``apply`` and in graph mode, for a plan that recomputes nothing and for the smallest plan, which
recomputes operators several times.

An operator that is recomputed has a cost of its own, whatever calls it. Two lines say what the same operators cost in
plain PyTorch without gradients: called by their modules, and called one after another by PyTorch's functions.
"""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
import remat.torch
from remat.running import machine

RESULT = Path(__file__).parent / "results" / "torch-host.md"
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
    graph_kept = remat.torch.compile(loss_fn, budget="100%", backend="aten")
    graph_kept(x).backward()
    graph_again = smallest_in_graph_mode(loss_fn, x)
    ways = {
        "plain": loss_fn,
        "a mode and hooks that do nothing": inside(mode_and_hooks, loss_fn),
        "apply, nothing recomputed": inside(lambda: kept, loss_fn),
        f"apply, {smallest.recomputed} recomputations": inside(lambda: again, loss_fn),
        "graph mode, nothing recomputed": graph_kept,
        f"graph mode, {graph_again.plan.recomputed} recomputations": graph_again,
    }
    ops = everything.step.recording.forward_ops
    least = {name: (float("inf"), float("inf")) for name in ways}
    without = {"plain without gradients": loss_fn, "operators alone without gradients": operators_of(model)}
    least_without = dict.fromkeys(without, float("inf"))
    gc.disable()
    for _ in range(STEPS):
        for name, way in ways.items():
            model.zero_grad()
            started = time.process_time()
            loss = way(x)
            between = time.process_time()
            loss.backward()
            ended = time.process_time()
            least[name] = (min(least[name][0], between - started), min(least[name][1], ended - between))
        with torch.no_grad():
            for name, way in without.items():
                started = time.process_time()
                way(x)
                least_without[name] = min(least_without[name], time.process_time() - started)
        gc.collect()
    gc.enable()
    lines = [
        {"name": name, "ops": ops, "forward_us": forward_s / ops * 1e6, "backward_us": backward_s / ops * 1e6}
        for name, (forward_s, backward_s) in least.items()
    ]
    for name, forward_s in least_without.items():
        lines.append({"name": name, "ops": ops, "forward_us": forward_s / ops * 1e6})
    _, _, *pairs = map(sum, least.values())
    for name, none, some, runs in (
        ("apply", *pairs[:2], smallest.recomputed),
        ("graph mode", *pairs[2:], graph_again.plan.recomputed),
    ):
        lines.append({"name": f"each recomputation, {name}", "ops": runs, "backward_us": (some - none) / runs * 1e6})
    return lines


def main() -> None:
    text = written(table())
    RESULT.write_text(text)
    print(text)


def written(lines: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    where = machine.described()
    text = [
        f"# What plans cost the host: {lines[0]['ops']} operators in the forward pass, us per operator",
        "",
        f"{where['system']} {where['processor']}, {where['cores']} cores, one thread; torch {torch.__version__}.",
        "",
        "| | forward | backward |",
        "|---|---|---|",
    ]
    for line in lines:
        figures = [f"{line[name]:.1f}" if name in line else "" for name in ("forward_us", "backward_us")]
        text.append(f"| {line['name']} | {' | '.join(figures)} |")
    return "\n".join(text) + "\n"


def operators_of(model: nn.Sequential) -> Any:
    """The model's operators with no module around them."""
    matrices = [(layer.weight, layer.bias) for layer in model if isinstance(layer, nn.Linear)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for weight, bias in matrices:
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x.square().mean()

    return run


def inside(context: Any, loss_fn: Any) -> Any:
    """The loss function with its forward pass in a context."""

    def run(x: torch.Tensor) -> Any:
        with context():
            return loss_fn(x)

    return run


def smallest_in_graph_mode(loss_fn: Any, x: torch.Tensor) -> Any:
    """The loss function in graph mode within the smallest budget that a plan is found for."""
    found = remat.torch.compile(loss_fn, budget=1, backend="aten", time_limit_s=2)
    try:
        found(x)
    except remat.InfeasibleBudget as error:
        found = remat.torch.compile(loss_fn, budget=error.minimum_bytes, backend="aten", time_limit_s=2)
        found(x).backward()
    return found


def least_bytes(loss_fn: Any, x: torch.Tensor) -> int:
    """The smallest budget that a plan is found for."""
    try:
        remat.torch.plan(loss_fn, x, budget=1, time_limit_s=2)
    except remat.InfeasibleBudget as error:
        return error.minimum_bytes
    return 1


if __name__ == "__main__":
    main()
