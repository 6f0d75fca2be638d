"""What a framework supplies to the zoo: its models, and for each of them a step prepared by some method."""

from __future__ import annotations

import abc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

PLAIN = "plain"


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run.

    Attributes:
        peak_bytes: of the step, by the framework's best counter.
        run: runs one step and waits for it.
        results: the values to compare: the loss and its gradients, or what the step returns.
        planning_s: processor seconds of planning; 0 for a peer.
        compiling_s: processor seconds of the framework's own tracing and compiling.
        predicted: the extra time that a plan predicts, as a fraction of the plain step; None for a peer.
        predicted_bytes: the peak that a plan predicts, where that is not what ``peak_bytes`` was taken from.
        budget_bytes: what the plan was to keep; None where the budget is one of the plain step's measured peak.
        said: what remat warned of in the step that was measured, or in those before it.
        mode: how the plan is carried out, where there are several ways.
        sensitivity: the difference of the plain step's results if its weights were others by rounding; None where that
            was not tried.
        clock: the processor seconds so far of the process that runs the step.
        beside_bytes: the most at once of what the counter leaves out, where that is known; at another moment, maybe.
    """

    peak_bytes: int
    run: Callable[[], None]
    results: Callable[[], Sequence[Array]]
    planning_s: float = 0.0
    compiling_s: float = 0.0
    predicted: float | None = None
    predicted_bytes: int | None = None
    budget_bytes: int | None = None
    said: str = ""
    mode: str = ""
    sensitivity: float | None = None
    clock: Callable[[], float] = time.process_time
    beside_bytes: int = 0


class Subject(abc.ABC):
    """One model of the zoo.

    Attributes:
        peers: names of the ways to save memory that this model is compared with.
        clock: the processor seconds so far of the process that plans; None where that is not this one.
        captures: does remat run the step itself, in place of the framework?
        predicts_pages: do its plans' predictions know what a step takes for pages that it fetches from the system anew?
    """

    peers: tuple[str, ...] = ()
    captures: bool = False
    predicts_pages: bool = True
    clock: Callable[[], float] | None = None

    @abc.abstractmethod
    def peer(self, method: str) -> Prepared:
        """The step by a peer's method, or ``PLAIN``."""

    @abc.abstractmethod
    def planned(self, budget: int | str) -> Prepared:
        """The step by remat.

        Raises:
            remat.InfeasibleBudget: where nothing fits; it names the smallest budget.
        """


Models = Mapping[str, Callable[[], Subject]]


def environment_of(framework: str) -> dict[str, str]:
    """Variables that a process needs which measures this framework's models, beside those that are set."""
    module, backend = _module_of(framework)
    make: Callable[..., dict[str, str]] = getattr(module, "environment", dict)
    return make(backend) if backend else make()


def is_apart(framework: str) -> bool:
    """Does each method of a model need a process of its own?"""
    return bool(getattr(_module_of(framework)[0], "IS_APART", False))


def models_of(framework: str) -> Models:
    """The models of a framework; each is built when it is called."""
    models: Models = _module_of(framework)[0].MODELS
    return models


def _module_of(framework: str) -> tuple[Any, str]:
    """Its folder, and its backend where it has several: ``keras-jax``."""
    folder, _, backend = framework.partition("-")
    return importlib.import_module(f"benchmarks.zoo.{folder}"), backend
