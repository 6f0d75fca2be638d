"""Keras on PyTorch in graph mode: the forward pass and the loss of a training step are captured, and run by a plan.

What comes after the backward pass (the optimizer's update, the metrics) is Keras' own and runs as it is. Its memory is
known from the traced step, and counts.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.request import Request
from remat.keras import _private
from remat.torch.api.compile import reason_not_captured
from remat.torch.api.plan import EagerCandidate


class NotCaptured(Exception):
    """A step that graph mode cannot capture; nothing of it has run. The text says why, and where."""


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What is known of the steps on batches of one combination of shapes.

    Attributes:
        plain_bytes: the peak of the plain step.
        update_bytes: what the optimizer's update needs, at which no plan changes anything.
    """

    plain_bytes: int
    update_bytes: int


class GraphSteps:
    """The training steps of one model within a budget, captured for each combination of shapes.

    It does not hold the model, which is an argument of the captured function.

    Args:
        request: with a budget in bytes.
        state_bytes: of the optimizer, which lies beside the step.
        strict: is a step over its budget an error, once it was planned again?
        replans: is a step planned again whose first run took more than its budget?
    """

    def __init__(self, request: Request, state_bytes: int, *, strict: bool, replans: bool) -> None:
        from remat.torch.graph_mode import capture  # It imports Dynamo, which takes seconds.

        assert isinstance(request.budget, int)
        self.request = request
        self._made: list[Plan] = []
        self._captured = capture.Captured(
            _function_of_its_own(), request, lambda _: state_bytes, None, self._made, strict=strict, replans=replans
        )
        self._not_captured = capture.NOT_CAPTURED
        self._shapes: dict[Hashable, _Shapes] = {}
        self._plans: list[tuple[Any, _Shapes]] = []

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step, the newest if there are several; None before the first step."""
        largest = max((shapes.plain_bytes for _, shapes in self._plans), default=0)
        for plan, shapes in reversed(self._plans):
            if shapes.plain_bytes == largest:
                peak_bytes = max(plan.peak_bytes, shapes.update_bytes)
                found: Plan = dataclasses.replace(plan, peak_bytes=peak_bytes, baseline_peak_bytes=largest)
                return found
        return None

    @property
    def graph(self) -> Graph | None:
        """The captured step that ``plan`` is for: both passes, without the update."""
        plan: Any = self.plan
        return None if plan is None else plan.graph

    def knows(self, key: Hashable) -> bool:
        """Was a step on a batch of these shapes traced?"""
        return key in self._shapes

    def add(self, key: Hashable, whole: EagerCandidate) -> None:
        """Take note of a step with its update, as it was traced for batches of these shapes.

        Raises:
            InfeasibleBudget: if the update alone needs more than the budget.
        """
        graph = whole.graph
        timeline = simulate(graph, graph.plain_schedule)
        update = [size for op, size in zip(graph.ops, timeline.bytes, strict=True) if op.phase == "update"]
        update_bytes = max(update, default=0)
        if update_bytes > int(self.request.budget or 0):
            whole.fitted(self.request)  # It raises the error that names the smallest budget.
        self._shapes[key] = _Shapes(timeline.peak_bytes, update_bytes)

    def run(self, model: keras.Model, key: Hashable, batch: Sequence[Any]) -> dict[str, Any]:
        """One training step as ``keras.Model.train_step`` does it, on a batch of known shapes; returns the logs.

        Args:
            model: built, its gradients cleared.
            key: of the batch's shapes.
            batch: inputs, targets, sample weights.

        Raises:
            NotCaptured: where Dynamo cannot capture the step.
            InfeasibleBudget: if no plan fits; it names the smallest budget.
            PlanMismatch: with ``strict``, where the step takes more than the budget.
        """
        x, y, sample_weight = (keras.tree.map_structure(_as_tensor, one) for one in batch)
        # The model's call begins so, too. What it finds there is guarded, and would be another tensor at each step.
        _private.clear_losses(model)
        try:
            loss, y_pred = self._captured(model, x, y, sample_weight)
        except (UnsupportedStep, *self._not_captured) as error:
            raise NotCaptured(reason_not_captured(error)) from None
        self._plans += [(plan, self._shapes[key]) for plan in self._made[len(self._plans) :]]
        size = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None).shape[0]
        _private.update_loss_tracker(model, loss, size)
        if model.optimizer is not None:
            loss = model.optimizer.scale_loss(loss)
        if model.trainable_weights:
            loss.backward()
            _update(model)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[no-any-return]


def _update(model: keras.Model) -> None:
    variables = list(model.trainable_weights)
    gradients = [variable.value.grad for variable in variables]
    with torch.no_grad():
        model.optimizer.apply(gradients, variables)


def _as_tensor(leaf: Any) -> Any:
    """A leaf of a batch, of which ``train_on_batch`` takes NumPy arrays, too: these are no part of a captured graph."""
    return leaf if leaf is None or isinstance(leaf, torch.Tensor) else keras.ops.convert_to_tensor(leaf)


def _loss_and_output(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """What Keras' own training step differentiates, and what the model returned, for its metrics."""
    y_pred = _private.call_in_training(model, x)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    # Nothing is differentiated through the metrics. A gradient for what they see would be computed, all zeros.
    return loss, keras.tree.map_structure(lambda one: one.detach(), y_pred)


def _function_of_its_own() -> Callable[..., Any]:
    """A copy of ``_loss_and_output``: Dynamo counts captures by code objects, those of other models likewise."""
    code = _loss_and_output.__code__.replace()
    return types.FunctionType(code, _loss_and_output.__globals__, _loss_and_output.__name__)
