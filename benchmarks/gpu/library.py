"""Models of libraries on a GPU: those of PyTorch's zoo, whose batches are repeated until their tensors count."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

import remat.torch
from benchmarks.gpu.torch_models import Step

REPEATS: Final = 16
"""Of a batch: a step of the zoo takes 50 to 100 MiB, of which cuBLAS' workspaces on a GPU alone would be the most."""


def library_step(name: str, device: str, small: bool) -> Step:
    """A model of the zoo, as it is trained there.

    Args:
        name: in the zoo.
        device: as PyTorch names it.
        small: keep the zoo's batch, for a machine without a GPU.
    """
    from benchmarks.zoo.torch import MODELS  # It imports the libraries, which other parts do without.
    from benchmarks.zoo.torch.subject import MODE, TorchModel

    os.environ.setdefault(MODE, "auto")
    subject = MODELS[name]()
    assert isinstance(subject, TorchModel)
    module = subject.module.to(device)
    batch = repeated(subject.batch, 1 if small else REPEATS, device)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    own_bytes = sum(tensor.nbytes for tensor in (*tensors, *module.parameters(), *module.buffers()))
    return Step(functools.partial(subject.loss, module, batch), (), list(module.parameters()), own_bytes)


def repeated(batch: Mapping[str, Any], times: int, device: str) -> dict[str, Any]:
    """The batch with each of its samples several times, on a device.

    Tensors of another first dimension than the most have belong to no sample (FLUX' places of patches): they stay.
    """
    counts = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim]
    samples = max(set(counts), key=counts.count)

    def one(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: one(part) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if not value.ndim or value.shape[0] != samples:
            return value.to(device)
        return value.repeat_interleave(times, 0).to(device)

    return {key: one(value) for key, value in batch.items()}


def limited(step: Step, budget: int) -> tuple[Step, Any]:
    """The step under ``remat.torch.limit_memory`` once it has run, and what that returned.

    Raises:
        InfeasibleBudget: if nothing fits.
    """
    from benchmarks.zoo.torch.subject import FIRST_STEPS

    ours = remat.torch.limit_memory(step.loss, budget)
    for _ in range(FIRST_STEPS):
        ours(*step.args).backward()
        for parameter in step.parameters:
            parameter.grad = None
    return replace(step, loss=ours), ours
