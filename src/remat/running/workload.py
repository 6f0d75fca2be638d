"""A training step that can be traced and run: what ``remat plan``, ``measure`` and ``check`` need of a framework.

A user points the command line at a callable, which returns a model, or a function and its arguments. Each front end has
a module ``remat.<framework>.workload`` whose ``make_workload(made, options)`` turns that into a ``Workload``. Nothing
else in the command line tells frameworks apart.
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
"""Samples in a batch where the user does not say, as in ``fit`` of Keras."""


class NotAStep(RematError, ValueError):
    """The user's callable returned something that is no training step; the message says what to return instead."""


@dataclass(frozen=True)
class InputShape:
    """An input of a model, as the user wrote it on the command line.

    Attributes:
        shape: its shape without the batch.
        dtype: its type; None for the framework's default.
    """

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class StepOptions:
    """What the user says about a step besides the callable; None, or nothing, where the user does not say.

    Attributes:
        batch_size: samples in a batch.
        inputs: shapes of the inputs, for models that do not say what they take.
        loss: the name of a loss that the framework knows.
        optimizer: the name of an optimizer that the framework knows.
        whole_step: does the function do a whole training step, gradients and update included? Otherwise it returns a
            loss.
        mode: how PyTorch carries out a plan, as ``remat.torch.limit_memory`` takes it.
    """

    batch_size: int | None = None
    inputs: tuple[InputShape, ...] = ()
    loss: str | None = None
    optimizer: str | None = None
    whole_step: bool = False
    mode: str | None = None

    @property
    def samples(self) -> int:
        """The batch size, the default where the user gave none."""
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def refuse(self, framework: str, *names: str) -> None:
        """Refuse options that a framework has no use for.

        Args:
            framework: its name, for the error.
            *names: of the attributes that must not have been given.

        Raises:
            NotAStep: for the first of them that was given.
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
        peak_bytes: the largest measured peak of a step, by the framework's own counter; 0 where it has none.
        step_time_s: median wall seconds of a step; the first step, which compiles, is left out.
        losses: the loss of each step.
        values: what the steps left behind, by name. A name begins with the kind of the value:
            ``"weight/dense/kernel"``. Kinds are "weight", "slot" (of the optimizer), "statistic" (running means) and
            "state" (seeds and counters, which must be equal to the bit).
        plan: the plan in force; None for plain training.
        graph: the step that the plan is for; None for plain training.
    """

    peak_bytes: int
    step_time_s: float
    losses: tuple[float, ...]
    values: Mapping[str, Array] = field(repr=False)
    plan: Plan | None = None
    graph: Graph | None = None


class Workload(Protocol):
    """A training step of some framework that can be traced, and run again and again.

    Every method starts from the weights, optimizer state, seeds and batches that the workload was made with, so that
    two runs can be compared. A budget of None means the plain step. ``nudged`` starts from weights that were moved by
    half a rounding (see ``nudge``), which shows what rounding alone does to the results.
    """

    @property
    def framework(self) -> str:
        """The framework's name: "keras"."""

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch; None where only the user's callable knows."""

    def graph(self, device: str) -> Graph:
        """The traced step. Nothing is run, and no activation is allocated.

        Args:
            device: the profile for the predicted times, see ``remat.running.cost_model.get_profile``.
        """

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps of training."""

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the first step by name; empty where the framework does not give them out."""

    def restore(self) -> None:
        """Give the user's model its weights and states back."""


def nudge(values: Array, random: np.random.Generator) -> Array:
    """Values moved by half a rounding, each up or down by chance; what is no floating-point number stays.

    Two correct ways to compute the same cannot be expected to agree better than training from two such sets of weights.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return values
    moved = values * (1 + np.finfo(values.dtype).eps * random.choice([-0.5, 0.5], values.shape))
    return np.asarray(moved, dtype=values.dtype)
