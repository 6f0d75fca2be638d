"""A memory limit on one model: what every backend's ``Limit`` knows and does alike."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from typing import Any, ClassVar, Final

import keras

from remat.core.budget import parse_budget
from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.request import AUTO, Request
from remat.keras.shared.step import CheckedStep
from remat.micro_batches.options import MicroBatchChoice

_FRAMEWORKS: Final = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


class ModelLimit(abc.ABC):
    """A memory limit on one model; each backend's ``Limit`` makes its own training function.

    Keras builds its training function in ``make_train_function``. The limit replaces that method on this one object
    until it is taken off. The new function runs the model's own ``train_step``, or in micro-batches one that does the
    same as that of Keras.

    Args:
        model: the model.
        request: the budget, or the checkpoints; with neither, nothing is planned.
        micro_batches: how many pieces a batch is cut into; None to choose when the first batch comes, for which the
            request has a budget.
        replans: is a step planned again, once, whose first run took more than its budget?
        strict: is it an error where the budget does not hold then either? Else it is logged.
        checks_first_step: is the first step run plainly, too, and compared?

    Raises:
        ValueError: for a checkpoint that names no layer of the model.
        UnsupportedStep: for a model that cannot be cut or planned on this backend, for a lever that the backend does
            not have, and where something else has replaced the model's ``make_train_function``.
    """

    step_in_micro_batches: ClassVar[type[CheckedStep]]
    """The ``MicroBatchedStep`` of the backend."""

    kept_layers: ClassVar[type[Any]]
    """The ``KeptLayers`` of the backend."""

    levers: ClassVar[tuple[str, ...]] = ("recompute", "micro_batches")
    """What a plan of the backend may do; any other lever is refused by its name."""

    levers_of_pieces: ClassVar[tuple[str, ...]] = ("recompute", "micro_batches")
    """Likewise where the user gives a number of micro-batches."""

    default_levers: ClassVar[tuple[str, ...]] = ("recompute",)
    """What a plan may do where the user does not say: nothing that changes a number."""

    def __init__(
        self,
        model: keras.Model,
        request: Request,
        micro_batches: int | None,
        *,
        replans: bool = True,
        strict: bool = False,
        checks_first_step: bool = False,
    ) -> None:
        self._check_levers(request, micro_batches)
        self._model = weakref.ref(model)
        self._replans, self._strict = replans, strict
        self._checks_first_step = checks_first_step
        self._request = request
        self._chooses = micro_batches is None
        self._choice: MicroBatchChoice | None = None
        self._set_micro_batches(model, micro_batches or 1)
        self._kept = None if request.checkpoints is None else self.kept_layers(model, request.checkpoints)
        if "make_train_function" in vars(model):
            raise UnsupportedStep(f"something else has replaced make_train_function of {model.name!r}; undo that first")
        model.make_train_function = self._make_train_function
        model.train_function = None

    def _check_levers(self, request: Request, micro_batches: int | None) -> None:
        """Refuse what a plan of this backend cannot do.

        Raises:
            UnsupportedStep: for such a lever, by its name.
        """
        known, where = self.levers, f"Keras on {_FRAMEWORKS[keras.backend.backend()]}"
        if micro_batches is not None and micro_batches > 1:
            known, where = self.levers_of_pieces, f"{where} with micro_batches={micro_batches}"
        if missing := [lever for lever in request.levers if lever not in known]:
            raise UnsupportedStep(
                f"{where} does not have the lever {missing[0]!r}; leave it out of levers={request.levers!r}, of which "
                f"it takes {', '.join(known)}"
            )

    @property
    @abc.abstractmethod
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""

    @property
    @abc.abstractmethod
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""

    @property
    def choice(self) -> MicroBatchChoice | None:
        """What was chosen from which numbers of micro-batches; None before the first step, or where it was given."""
        return self._choice

    def is_of(self, model: keras.Model) -> bool:
        """Is this the model whose memory is limited?"""
        return self._model() is model

    def detach(self) -> None:
        """Give the model its own training step back."""
        model = self._model()
        if model is not None:
            vars(model).pop("make_train_function", None)
            model.train_function = None

    @abc.abstractmethod
    def _make_train_function(self, force: bool = False) -> Any:
        """In place of the model's ``make_train_function``."""

    @abc.abstractmethod
    def _auto_budget_bytes(self) -> int:
        """What the budget "auto" means on the device that the step runs on.

        Raises:
            InvalidBudget: on a CPU.
        """

    def _set_micro_batches(self, model: keras.Model, count: int) -> None:
        self._micro_batches = count
        self._micro_step: Any = self.step_in_micro_batches(model, count) if count > 1 else None

    def _chosen(self, model: keras.Model, choice: MicroBatchChoice) -> None:
        """Follow a choice of the number of micro-batches, and say why it was made."""
        print(choice, flush=True)
        self._choice = choice
        self._set_micro_batches(model, choice.micro_batches)

    def _budgeted(self) -> Request:
        """The request, "auto" being the memory of the GPU less a margin.

        Raises:
            InvalidBudget: for "auto" on a CPU.
        """
        if self._request.budget != AUTO:
            return self._request
        return dataclasses.replace(self._request, budget=self._auto_budget_bytes())

    def _required_model(self) -> keras.Model:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this memory limit is gone")
        return model


def is_share(budget: int | str | None) -> bool:
    """Is a budget a percentage of a peak, which is no number of bytes by itself?"""
    return isinstance(budget, str) and budget.strip().endswith("%")


def in_bytes(request: Request, share_of_bytes: int) -> Request:
    """The request with its budget in bytes.

    Args:
        request: with a budget.
        share_of_bytes: what a percentage is one of: the plain peak of the whole batch's step.
    """
    assert request.budget is not None
    # A step without a tensor has a plain peak of 0.
    return dataclasses.replace(request, budget=parse_budget(request.budget, max(1, share_of_bytes)))
