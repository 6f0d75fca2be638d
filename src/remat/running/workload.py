"""A training step that can be traced and run: what ``remat plan``, ``measure`` and ``check`` need of a framework.

Each front end has one module ``remat.<framework>.workload`` with ``make_workload(made, options)``, which turns what a
user's callable returned into such a step. Nothing else in the command line knows frameworks apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from remat.core.errors import RematError
from remat.core.graph import Graph
from remat.core.plan import Plan

Array = npt.NDArray[Any]

DEFAULT_BATCH_SIZE: Final = 32


class NotAStep(RematError, ValueError):
    """What a callable returned is no training step; the message says what to return instead."""


@dataclass(frozen=True)
class InputShape:
    """An input as the user wrote it: its shape without the batch, and its dtype, None for the framework's default."""

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class StepOptions:
    """What the user says about a step beside the callable; None where nothing.

    Attributes:
        batch_size: samples in a batch.
        inputs: shapes of the inputs, for models that do not say what they take.
        loss: name of a loss that the framework knows.
        optimizer: name of an optimizer that the framework knows.
        whole_step: is the function a whole training step, gradients and update included, instead of a loss?
    """

    batch_size: int | None = None
    inputs: tuple[InputShape, ...] = ()
    loss: str | None = None
    optimizer: str | None = None
    whole_step: bool = False

    @property
    def samples(self) -> int:
        """The batch size, the default where the user gave none."""
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def refuse(self, framework: str, *names: str) -> None:
        """Make sure that options were not given which a framework has no use for.

        Raises:
            NotAStep: for the first one given.
        """
        flags = {"inputs": "--input", "loss": "--loss", "optimizer": "--optimizer", "batch_size": "--batch-size"}
        for name in names:
            if getattr(self, name):
                raise NotAStep(
                    f"{flags.get(name, name)} does not go with a {framework} function, which brings its own; "
                    "leave it out, or let the callable take it as an argument"
                )


@dataclass(frozen=True)
class Training:
    """What a few steps of training came to.

    Attributes:
        peak_bytes: the largest measured peak of a step, by the framework's own counter.
        step_time_s: median wall seconds of a step, the first left out.
        losses: of each step.
        values: what the steps left behind, by kind and name: ``"weight/dense/kernel"``. Kinds are "weight", "slot"
            (of the optimizer), "statistic" (running means) and "state" (seeds and counters, compared exactly).
        plan: the plan in force, None for plain training.
        graph: the step that the plan is for.
    """

    peak_bytes: int
    step_time_s: float
    losses: tuple[float, ...]
    values: Mapping[str, Array] = field(repr=False)
    plan: Plan | None = None
    graph: Graph | None = None


class Workload(Protocol):
    """A training step of some framework. Every method starts from the same first weights, states and batches."""

    @property
    def framework(self) -> str:
        """The framework's name, "keras"."""

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, None where the callable alone knows."""

    def graph(self, device: str) -> Graph:
        """The step, traced; nothing is run and no activation is allocated."""

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps, plainly or under a budget; ``nudged`` from weights that are half a rounding off."""

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the first step by name; empty where the framework does not give them out."""

    def restore(self) -> None:
        """Set everything back to how it was found."""


def nudge(values: Array, random: np.random.Generator) -> Array:
    """Values moved by half a rounding, up or down: no two ways to compute the same can be expected to agree better."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    moved = values * (1 + np.finfo(values.dtype).eps * random.choice([-0.5, 0.5], values.shape))
    return np.asarray(moved, dtype=values.dtype)
