"""Whole training steps as users write them: autocast, AdamW, a scaler for float16; plain, then within a budget."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

import remat
import remat.torch
from benchmarks.gpu.torch_models import Step, step_of

STEPS: Final = 4
SEED: Final = 17
SHARES: Final = (0.75, 0.6)
"""Of the plain training's peak, with the optimizer's state and its temporaries in it."""

SMALLEST: Final = "remat, smallest"


def lines(model: str, dtype: str, device: str, small: bool) -> Iterator[dict[str, Any]]:
    """Plain training, then training within shares of its peak: peak, losses and weights after some steps.

    Args:
        model: one of ``MODELS``.
        dtype: of autocast; weights are float32.
        device: as PyTorch names it.
        small: a few layers, for a machine without a GPU.
    """
    torch.use_deterministic_algorithms(True)
    training = Training(model, dtype, device, small)
    expected, plain = training.run()
    yield {"name": "plain", **plain, "difference": 0.0, "equal_bits": True}
    for name, budget, options in cases(plain["peak_bytes"], dtype):
        made, smallest_bytes = training.within(budget, **options)
        if made is None and name == SMALLEST:
            made, smallest_bytes = training.within(smallest_bytes, **options)
        if made is None:
            yield {"name": name, "budget_bytes": budget, "error": "refused", "smallest_bytes": smallest_bytes}
            continue
        found, line = made
        pairs = list(zip(found, expected, strict=True))
        yield {
            "name": name,
            **line,
            "budget_bytes": smallest_bytes if name == SMALLEST else budget,
            "relative_time": line["step_s"] / plain["step_s"],
            "difference": max(float((a - b).abs().max()) for a, b in pairs),
            "equal_bits": all(torch.equal(a, b) for a, b in pairs),
        }


def cases(plain_bytes: int, dtype: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What the lines are called, their budgets, and the options of ``limit_memory``."""
    for share in SHARES:
        yield f"remat, {share:.0%}", int(share * plain_bytes), {}
    yield SMALLEST, 1, {}
    yield f"remat, {SHARES[0]:.0%}, measured", int(SHARES[0] * plain_bytes), {"device": "measured"}
    if dtype != "float16":  # A scaler reads all gradients.
        yield f"remat, {SHARES[0]:.0%}, update", int(SHARES[0] * plain_bytes), {"levers": ("recompute", "update")}


class Training:
    """A model that is trained anew, from the same weights, at each run."""

    def __init__(self, model: str, dtype: str, device: str, small: bool) -> None:
        self._made = (model, "float32", device, small)
        self._dtype, self._device = getattr(torch, dtype), device

    def within(self, budget: int, **options: Any) -> tuple[tuple[list[torch.Tensor], dict[str, Any]] | None, int]:
        """What ``run`` returns and the budget; for a budget that is too small None and the smallest.

        Nothing of a refused run is left when this returns: an error holds what its frames held.
        """
        try:
            return self.run(budget, **options), budget
        except remat.InfeasibleBudget as error:
            return None, error.minimum_bytes

    def run(self, budget: int | None = None, **options: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Losses and weights after ``STEPS`` steps, on the host, and the line of the run.

        The peak is that of the steps after the first two: by then the optimizer has its state, and plans are made.

        Args:
            budget: in bytes; None trains without one.
            **options: of ``limit_memory``.
        """
        step = step_of(*self._made)
        scaler = torch.amp.GradScaler(self._device, enabled=self._dtype == torch.float16)
        optimizer = torch.optim.AdamW(step.parameters, lr=1e-4)

        def loss_of(*args: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self._device, self._dtype):
                return step.loss(*args)

        loss_fn: Any = loss_of
        if budget is not None:
            loss_fn = remat.torch.limit_memory(loss_of, budget, optimizer=optimizer, **options)
        losses, seconds = [], []
        for number in range(STEPS):
            if number == 2:
                self._reset()
            started = time.perf_counter()
            torch.manual_seed(SEED + number)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(*step.args)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().float().cpu())
            seconds.append(time.perf_counter() - started)
        line = {**self._peak(loss_of, step, optimizer), "first_step_s": seconds[0], "step_s": min(seconds[2:])}
        if budget is not None:
            plan = loss_fn.plans[-1]
            line |= {"mode": plan.mode, "predicted_bytes": plan.peak_bytes, "predicted_time": 1 + plan.overhead}
            if self._device != "cuda":
                line["peak_bytes"] = plan.measured_peak_bytes
        return [torch.stack(losses), *(p.detach().cpu() for p in step.parameters)], line

    def _reset(self) -> None:
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self, loss: Any, step: Step, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Of whole steps on a GPU; on a CPU, that of a plain pass with the optimizer's state beside it."""
        if self._device == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
        passes_bytes = remat.torch.measure(loss, *step.args, repeats=1).peak_bytes
        return {"peak_bytes": passes_bytes + sum(t.nbytes for t in state)}
