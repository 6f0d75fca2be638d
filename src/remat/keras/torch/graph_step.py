"""Keras on PyTorch in graph mode: the forward pass and loss of a step, or of a micro-batch, are captured and planned.

What comes after the backward pass (the optimizer's update, the metrics) is Keras' own and runs as it is. Its memory is
known from the traced step, and counts.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import keras
import torch

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.fit import infeasible
from remat.fit.request import Request
from remat.keras import _private
from remat.keras.shared.step import LossGroups, LossTerm, PieceLoss
from remat.keras.torch import _for_dynamo
from remat.keras.torch.called_step import state_of, why_not_called
from remat.keras.torch.kept_layers import KeptLayers
from remat.keras.torch.step import CutBatch, Piece, piece_of
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


_NUMBERS_BYTES: Final = 16
"""Of the loss and its tracker, while the backward pass runs: numbers that Keras makes outside of what is captured."""


class GraphSteps:
    """The training steps of one model within a budget, captured for each combination of shapes.

    It does not hold the model, which is an argument of the captured function.

    Args:
        model: built.
        request: with a budget in bytes; without one where layers are kept.
        kept: layers whose outputs are kept, all else being recomputed; None where the budget decides.
        state_bytes: of the optimizer, which lies beside the step.
        whole_bytes: where micro-batches are captured, the plain peak of a whole batch's step, 0 if nobody asked for it;
            None where whole batches are captured.
        optimizer: built; with the lever "update" it updates variables in the backward pass of a whole batch.
        strict: is a step over its budget an error, once it was planned again?
        replans: is a step planned again whose first run took more than its budget?
    """

    def __init__(
        self,
        model: keras.Model,
        request: Request,
        state_bytes: int,
        kept: KeptLayers | None,
        *,
        whole_bytes: int | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        strict: bool,
        replans: bool,
    ) -> None:
        from remat.torch.graph_mode import capture  # It imports Dynamo, which takes seconds.

        _for_dynamo.assume_constants()
        self._early = None
        if "update" in request.levers and whole_bytes is None and optimizer is not None:
            from remat.keras.torch.early_updates import KerasUpdates

            self._early = KerasUpdates(optimizer)
        if kept is not None:
            request = dataclasses.replace(request, checkpoints=kept.called)
        self.request = request
        self._kept = kept
        self._made: list[Plan] = []
        self._whole_bytes = whole_bytes
        function = _loss_and_output if whole_bytes is None else _targets_and_more

        def resident_bytes(gradients_bytes: int) -> int:
            beside_bytes = state_bytes + _NUMBERS_BYTES
            # Those of earlier micro-batches are added up while all of another's arrive.
            return beside_bytes if whole_bytes is None else beside_bytes + gradients_bytes

        def captured_for(request: Request) -> Callable[..., Any]:
            return capture.Captured(
                function,
                request,
                resident_bytes,
                None,
                self._made,
                strict=strict,
                replans=replans,
                takers_for=(lambda _: {}) if self._early is None else self._early.takers_for,
                early=self._early,
                state_of=state_of if self._is_called else None,
            )

        self._is_called = not why_not_called(model)
        self._captured_for = captured_for
        self._captured = captured_for(request)
        self._not_captured = capture.NOT_CAPTURED
        self._shapes: dict[Hashable, _Shapes] = {}
        self._targets: dict[Hashable, int] = {}
        self._plans: list[tuple[Any, _Shapes]] = []

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step, the newest if there are several; None before the first step."""
        largest = max((shapes.plain_bytes for _, shapes in self._plans), default=0)
        for plan, shapes in reversed(self._plans):
            if shapes.plain_bytes == largest:
                moved = plan.update is not None and plan.update.moved
                peak_bytes = plan.peak_bytes if moved else max(plan.peak_bytes, shapes.update_bytes)
                plain_bytes = self._whole_bytes or largest
                found: Plan = dataclasses.replace(plan, peak_bytes=peak_bytes, baseline_peak_bytes=plain_bytes)
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
        """Take note of a step with its update, as it was traced for batches of these shapes."""
        graph = whole.graph
        timeline = simulate(graph, graph.plain_schedule)
        update = [size for op, size in zip(graph.ops, timeline.bytes, strict=True) if op.phase == "update"]
        self._shapes[key] = _Shapes(timeline.peak_bytes, max(update, default=0))

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
        loss, (y_pred, masks) = self._call(key, model, x, y, sample_weight)
        _put_on(y_pred, masks)
        size = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None).shape[0]
        _private.update_loss_tracker(model, loss, size)
        if model.optimizer is not None:
            loss = model.optimizer.scale_loss(loss)
        if model.trainable_weights:
            loss.backward()
            if self._early is not None:
                self._early.finish(list(model.trainable_weights))
            else:
                _update(model)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[no-any-return]

    def run_piece(self, cut: CutBatch, key: Hashable, leaves: Sequence[Any]) -> Piece:
        """The forward pass of a micro-batch of known shapes, the first of which was traced with ``cut.loss_of_piece``.

        Raises:
            NotCaptured: where Dynamo cannot capture it.
            InfeasibleBudget: if no plan fits; it names the smallest budget.
        """
        if cut.targets is not None:
            self._targets[key] = cut.targets
        if self._targets[key] != 1:
            # All that autograd knows of a captured forward pass is one node, which would run once for each of them.
            raise NotCaptured(f"its loss has {self._targets[key]} parts, which are differentiated one after the other")
        with cut.statistics.raw():
            target, more = self._call(key, cut.model, *cut.packed(leaves), cut.batch_size)
        y_pred, masks, values, denominators, bounds, additional, weights, groups, counted = more
        _put_on(y_pred, masks)
        terms = [LossTerm(value, weight) for value, weight in zip(values, weights, strict=True)]
        loss = PieceLoss(values, denominators, bounds, additional, [target])
        return Piece(y_pred, terms, LossGroups(groups, counted), loss)

    def _call(self, key: Hashable, model: keras.Model, *args: Any) -> Any:
        # The model's call begins so, too. What it finds there is guarded, and would be another tensor at each step.
        _private.clear_losses(model)
        try:
            marking = nullcontext() if self._kept is None else self._kept.marking_captured()
            with marking:
                self._check_update(self._shapes[key], model, args)
                result = self._result(model, args)
        except (UnsupportedStep, *self._not_captured) as error:
            raise NotCaptured(reason_not_captured(error)) from None
        self._plans += [(plan, self._shapes[key]) for plan in self._made[len(self._plans) :]]
        return result

    def _result(self, model: keras.Model, args: Sequence[Any], request: Request | None = None) -> Any:
        """What the captured function returns.

        Args:
            model: see ``run``.
            args: the function's others.
            request: in place of the one in force, for this call only.
        """
        with nullcontext() if self._is_called else _for_dynamo.traceable():
            return (self._captured if request is None else self._captured_for(request))(model, *args)

    def _check_update(self, shapes: _Shapes, model: keras.Model, args: Sequence[Any]) -> None:
        """Refuse a budget that the update exceeds, naming what both passes and the update can be kept in.

        Raises:
            InfeasibleBudget: then.
        """
        budget_bytes = int(self.request.budget or 0)
        is_late = self._early is None or self._early.bound_by
        if self._kept is not None or not is_late or shapes.update_bytes <= budget_bytes:
            return
        least_bytes, binding_op = 0, ""
        try:
            self._result(model, args, dataclasses.replace(self.request, budget=1))
        except InfeasibleBudget as error:
            least_bytes, binding_op = error.minimum_bytes, error.binding_op
        if least_bytes < shapes.update_bytes:
            least_bytes, binding_op = shapes.update_bytes, "the optimizer's update"
        raise infeasible(budget_bytes, least_bytes, binding_op)


def _update(model: keras.Model) -> None:
    variables = list(model.trainable_weights)
    gradients = [variable.value.grad for variable in variables]
    with torch.no_grad():
        model.optimizer.apply(gradients, variables)


def _as_tensor(leaf: Any) -> Any:
    """A leaf of a batch, of which ``train_on_batch`` takes NumPy arrays, too: these are no part of a captured graph."""
    return leaf if leaf is None or isinstance(leaf, torch.Tensor) else keras.ops.convert_to_tensor(leaf)


def _loss_and_output(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, tuple[Any, list[Any]]]:
    """What Keras' own training step differentiates, and what the model returned, with its masks, for its metrics."""
    y_pred = _private.call_in_training(model, x)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    # Nothing is differentiated through the metrics. A gradient for what they see would be computed, all zeros.
    return loss, (keras.tree.map_structure(lambda one: one.detach(), y_pred), _masks_of(y_pred))


def _masks_of(y_pred: Any) -> list[Any]:
    """The mask that Keras keeps on each output, which metrics read; None for an output without one.

    What a tensor carries beside its values gets lost where it is detached, and where it leaves a captured function.
    """
    return [getattr(one, _private.MASK, None) for one in keras.tree.flatten(y_pred)]


def _put_on(y_pred: Any, masks: list[Any]) -> None:
    for one, mask in zip(keras.tree.flatten(y_pred), masks, strict=True):
        if mask is not None:
            setattr(one, _private.MASK, mask)


def _targets_and_more(model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int) -> tuple[Any, Any]:
    """What is differentiated for a micro-batch of a loss in one part, and what else its ``Piece`` has."""
    piece = piece_of(model, x, y, sample_weight, batch_size)
    loss, groups = piece.loss, piece.groups
    (target,) = loss.targets
    found = (piece.y_pred, loss.values, loss.denominators, loss.bounds, loss.additional)
    # Autograd would ask for a gradient of each.
    detached = keras.tree.map_structure(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, found)
    y_pred, *rest = detached
    return target, (
        y_pred,
        _masks_of(piece.y_pred),
        *rest,
        [term.weight for term in piece.terms],
        groups.groups,
        groups.counted,
    )
