"""Keras on TensorFlow: the training step is traced by Keras, planned and rewritten as its trace ends."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget, PlanMismatch, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, tell
from remat.fit.request import FIT_LEVERS, Request
from remat.keras._private import unbuilt_parts
from remat.keras.shared.first_step import Ran, checked_first_step
from remat.keras.shared.limit import ModelLimit, in_bytes, is_share
from remat.keras.shared.variables import Variables
from remat.keras.tensorflow.batches import (
    Shapes,
    grown_shapes,
    largest_shapes,
    leaves,
    may_grow,
    parts_of_replicas,
    same_type_of_iterator,
    unpacked,
)
from remat.keras.tensorflow.choose import choose_micro_batches
from remat.keras.tensorflow.kept_layers import KeptLayers
from remat.keras.tensorflow.step import MicroBatchedStep
from remat.keras.tensorflow.trace import label_model, traced_step
from remat.micro_batches.cut import largest_size
from remat.running.workload import Array
from remat.tensorflow import _private
from remat.tensorflow._traces import call_when_traced
from remat.tensorflow.emit.emit import Rewritten
from remat.tensorflow.micro_batches.choose import for_pieces
from remat.tensorflow.peak.device import Device, called_with, current_device
from remat.tensorflow.planned import rewrite
from remat.tensorflow.replicas import replica_here
from remat.tensorflow.trace.func_graph import FunctionToPlan, carried_inputs

_log = logging.getLogger("remat")

_MEASURED_STEPS: Final = 8
"""Steps under a plan that are held against its budget. An optimizer that assigns its variables anew puts them wherever
there is room, so that steps differ: an InceptionV3 took 219 MiB in its first step, 230 and more from its third on. With
more, a step that waits for the device to be measured costs more of them time."""


class Limit(ModelLimit):
    """A memory limit on one model: the graph of its training step is rewritten when its trace ends."""

    step_in_micro_batches = MicroBatchedStep
    kept_layers = KeptLayers
    levers = FIT_LEVERS
    default_levers = ("recompute", "update")
    levers_of_pieces = ("recompute", "micro_batches", "split")

    def __init__(self, model: keras.Model, request: Request, micro_batches: int | None, **on_broken: bool) -> None:
        self._run: Callable[[Any], Any] = model.train_function
        super().__init__(model, request, micro_batches, **on_broken)
        self._promised_bytes: int | None = None
        self._lowered_bytes: int | None = None
        self._broken: Plan | None = None
        self._steps_to_measure = 0
        self._measured_on = current_device()
        self._replicas = 1
        self._known_inputs: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[int, ...]]]
        self._known_inputs = weakref.WeakKeyDictionary()
        self._in_force = request
        self._whole_peak_bytes: int | None = None
        self._shapes: Shapes = []
        self._rewritten: Rewritten | None = None
        self._known_iterator: weakref.ref[tf.data.Iterator] | None = None
        self._has_outgrown = False

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._rewritten.plan if self._rewritten is not None else None

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""
        return label_model(self._rewritten.step, self._required_model()) if self._rewritten is not None else None

    @property
    def rewritten(self) -> Rewritten | None:
        """What was planned and written at the newest trace."""
        return self._rewritten

    def _auto_budget_bytes(self) -> int:
        return current_device().auto_budget_bytes()

    def _make_train_function(self, force: bool = False) -> Callable[..., Any]:
        model = self._required_model()
        if model.train_function is not None and not force:
            return model.train_function  # type: ignore[no-any-return]
        if model.run_eagerly:
            raise UnsupportedStep(
                f"{model.name!r} was compiled with run_eagerly=True, where operations run at once and nothing can be "
                "planned; compile it with run_eagerly=False, or do not limit its memory"
            )
        strategy = model.distribute_strategy
        self._replicas = strategy.num_replicas_in_sync
        if self._replicas > 1:
            self._check_replicas(model)
        own_train_step = model.train_step
        had_own = "train_step" in vars(model)
        model.train_step = lambda data: self._train_step(own_train_step, data)
        try:
            type(model).make_train_function(model, force=True)
        finally:
            if had_own:
                model.train_step = own_train_step
            else:
                del model.train_step
        self._run = model.train_function
        self._shapes = []
        if self._replicas == 1 or self._request.plans:
            model.train_function = self._train_function
        return model.train_function  # type: ignore[no-any-return]

    def _check_replicas(self, model: keras.Model) -> None:
        """Refuse what is not there under a strategy of several replicas.

        Raises:
            UnsupportedStep: naming it.
        """
        with_number = self._micro_batches > 1 and is_share(self._request.budget)
        refused = {
            'micro_batches="auto", which times steps on one device; give a number': self._chooses,
            "checkpoints=; give a budget": self._kept is not None,
            "check_first_step=True, which runs the step of one device; leave it out": self._checks_first_step,
            f"a share ({self._request.budget}) with micro_batches; give the budget in bytes": with_number,
            "XLA with a budget; compile it with jit_compile=False": bool(model.jit_compile) and self._request.plans,
            'the lever "split"; leave it out of levers=': "split" in self._request.levers,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise UnsupportedStep(
                    f"{model.name!r} trains on {self._replicas} replicas, for which limit_memory does not have {what}"
                )
        # An update waits for the reduction of all gradients, so early ones would win nothing.
        levers = tuple(lever for lever in self._request.levers if lever != "update") or ("recompute",)
        self._request = dataclasses.replace(self._request, levers=levers)
        self._in_force = dataclasses.replace(self._in_force, levers=levers)

    def _train_on_replicas(self, iterator: tf.distribute.DistributedIterator) -> Any:
        """Likewise, for data that a strategy hands out to replicas."""
        model = self._required_model()
        if self._known_iterator is not None and self._known_iterator() is iterator:
            return self._run_measured(iterator)
        batches = list(itertools.islice(iterator, model.steps_per_execution))
        if not batches:
            raise StopIteration
        parts = [part for batch in batches for part in parts_of_replicas(model.distribute_strategy, batch)]
        shapes = grown_shapes(self._shapes, largest_shapes(parts))
        if shapes != self._shapes:
            if self._shapes:
                self._make_train_function(force=True)
            self._shapes = shapes
            with model.distribute_strategy.scope():
                build(model, parts[0])
        del parts
        # A strategy's iterator cannot be made again from its values: the first batch goes by itself.
        result = self._run_measured(iter(batches))
        self._known_iterator = weakref.ref(iterator)
        return result

    def _train_function(self, iterator: Any) -> Any:
        """Keras' own training function, with the sizes of its data made known before it is traced."""
        if isinstance(iterator, tf.distribute.DistributedIterator):
            return self._train_on_replicas(iterator)
        model = self._required_model()
        is_dataset = isinstance(iterator, tf.data.Iterator)
        if is_dataset and self._known_iterator is not None and self._known_iterator() is iterator:
            return self._run_measured(iterator)
        batches = list(itertools.islice(iterator, model.steps_per_execution))
        if not batches:
            raise StopIteration
        is_open = is_dataset and may_grow(iterator.element_spec)
        before = self._shapes
        outgrown = is_open and self._has_outgrown
        shapes = before if outgrown else grown_shapes(before, largest_shapes(batches))
        if shapes != before:
            if before:
                # The function may not be traced again for a larger batch, so its plan must be made again.
                self._make_train_function(force=True)
            self._shapes = shapes
            build(model, batches[0])
            with called_with(leaves(batches[0])):
                self._plan_anew(model, unpacked(batches[0]), any_size=is_dataset)

        def again() -> Any:
            return same_type_of_iterator(batches, iterator.element_spec) if is_dataset else iter(batches)

        with called_with(leaves(batches[0])):
            if self._checks_first_step:
                self._checks_first_step = False
                return self._run_checked(model, again)
            data = again()
            if is_dataset:
                batches = []  # The data must not lie in memory twice when the step is planned.
            try:
                result = self._run_measured(data)
            except InfeasibleBudget as error:
                if self._strict or not is_open or not before or shapes == before:
                    raise
                self._keep_plan_for(before, shapes, error)
                result = self._run_measured(data)
        looks_at_each = is_open and self._replans and not self._has_outgrown
        if is_dataset and not looks_at_each:
            self._known_iterator = weakref.ref(iterator)
        return result

    def _keep_plan_for(self, before: Shapes, shapes: Shapes, error: InfeasibleBudget) -> None:
        """Where data of any size have come to more than a plan can hold: train on under the one for less, and say so.

        A training that runs is not refused its budget.
        """
        self._shapes = before
        self._has_outgrown = True
        self._trace_again()
        _log.warning(
            "Batches of up to %s have come, which no plan holds within the budget of %s: %s is the least. The plan for "
            "%s stays in force, and larger ones may take more than the budget. This is said once.",
            *(shapes, format_bytes(error.budget_bytes), format_bytes(error.minimum_bytes), before),
        )

    def _run_checked(self, model: keras.Model, data: Callable[[], Any]) -> Any:
        """Run the training function on data, plainly and planned, and compare what the two leave behind.

        Raises:
            PlanMismatch: if they differ, where the limit is strict.
        """
        variables = Variables(model)
        metrics = {id(variable): variable.numpy() for variable in model.metrics_variables}
        own = model.train_function
        type(model).make_train_function(model, force=True)
        plain, model.train_function = model.train_function, own

        def start_from(values: Sequence[Array]) -> None:
            for variable, value in zip(variables.all, values, strict=True):
                assign(variable, value)
            for variable in model.metrics_variables:
                before = metrics.get(id(variable))  # None for what the first run has made.
                variable.assign(tf.zeros_like(variable.value) if before is None else before)

        def run(planned: bool, values: Sequence[Array]) -> Ran:
            start_from(values)
            logs = (self._run_measured if planned else plain)(data())
            return logs, logs, [variable.value for variable in variables.all]

        try:
            return checked_first_step(model.name, variables, run, strict=self._strict)
        except BaseException:
            start_from(variables.first_values(nudged=False))
            raise

    def _plan_anew(self, model: keras.Model, batch: tuple[Any, Any, Any], *, any_size: bool) -> None:
        """For a batch that is larger than those before: choose again, or learn again what a percentage is one of."""
        if self._chooses:
            choice = choose_micro_batches(
                model, model.train_step, batch, self._shapes, self._budgeted(), any_size=any_size
            )
            self._chosen(model, choice)
            self._in_force = dataclasses.replace(self._request, budget=choice.budget_bytes, known=choice.chosen.plan)
        elif self._micro_step is not None and is_share(self._request.budget):
            data = keras.utils.pack_x_y_sample_weight(*batch)
            whole = traced_step(
                model, model.train_step, data, self._shapes, any_size=any_size, levers=self.levers
            ).plain
            self._whole_peak_bytes = whole.plain_peak.expected_bytes + whole.resident_bytes
            self._in_force = in_bytes(self._request, self._whole_peak_bytes)

    def _train_step(self, own_train_step: Callable[[Any], Any], data: Any) -> Any:
        """In place of the model's ``train_step``, while it is traced."""
        self._rewritten = None
        watched = contextlib.nullcontext() if self._kept is None else self._kept.watched()
        if self._micro_step is not None:
            on_body = self._plan_micro_batch if self._in_force.plans else None
            with watched:
                return self._micro_step(self._required_model(), data, on_body)
        # Replicas that share a process share the function: its inputs are known when all of them have been here.
        known = self._known_inputs.setdefault(tf.compat.v1.get_default_graph(), {})
        known |= self._real_shapes(leaves(data), self._shapes)
        self._plan_when_traced(lambda _: known)
        with watched:
            return own_train_step(data)

    def _plan_micro_batch(self, symbols: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor]) -> None:
        """Plan the body of the loop over the micro-batches, in which this is called."""

        def shapes(graph: _private.FuncGraph) -> dict[str, tuple[int, ...]]:
            inner = {outer.name: inside.name for outer, inside in graph.captures if tf.is_symbolic_tensor(outer)}
            known = {inner[n]: s for n, s in self._real_shapes(symbols, self._shapes).items() if n in inner}
            largest = [
                (largest_size(size, self._micro_batches) if piece.shape[0] is None else piece.shape[0], *rest)
                for piece, (size, *rest) in zip(pieces, self._shapes, strict=True)
            ]
            return known | self._real_shapes(pieces, largest)

        self._plan_when_traced(shapes)

    def _plan_when_traced(self, real_shapes: Callable[[_private.FuncGraph], dict[str, tuple[int, ...]]]) -> None:
        """Plan the innermost function and write the plan into it when its trace ends."""
        graph = tf.compat.v1.get_default_graph()
        in_xla = _private.in_xla_context(graph)
        replica = replica_here("limit_memory")

        def finish(succeeded: bool) -> None:
            if succeeded:
                is_piece = self._micro_step is not None
                function = FunctionToPlan(
                    graph,
                    real_shapes(graph),
                    in_xla,
                    forward_ends=_forward_ends(graph),
                    carried=carried_inputs(graph) if is_piece else frozenset(),
                    iterations=self._micro_batches,
                    replica=replica,
                )
                request = for_pieces(self._in_force) if is_piece else self._in_force
                if self._kept is not None:
                    request = dataclasses.replace(request, checkpoints=self._kept.tensors_in(graph))
                self._remember(self._rewritten_within(function, request))
                self._begin_to_measure(current_device() if replica is None else replica.memory)

        call_when_traced(finish)

    def _rewritten_within(self, function: FunctionToPlan, request: Request) -> Rewritten:
        """The function under a plan; after a step that broke its budget, under one for less, if there is one.

        Else under the plan that broke it: where an optimizer has moved its variables, they take more than before the
        first step, and a training that ran would be refused its budget.
        """
        if self._broken is None:
            return rewrite(function, request)
        assert self._promised_bytes is not None
        if self._lowered_bytes is not None:
            try:
                cautious = dataclasses.replace(request, budget=self._lowered_bytes, known=None, is_cautious=True)
                lowered = rewrite(function, cautious)
            except InfeasibleBudget:
                self._lowered_bytes = None
            else:
                plan = dataclasses.replace(lowered.plan, budget_bytes=self._promised_bytes)
                return dataclasses.replace(lowered, plan=plan)
        try:
            return rewrite(function, dataclasses.replace(request, plan=self._broken, known=None))
        except PlanMismatch:  # The step is another one by now.
            return rewrite(function, request)

    def _begin_to_measure(self, device: Device) -> None:
        """What the trace itself took does not count: it is over."""
        self._measured_on = device
        self._steps_to_measure = _MEASURED_STEPS if self._request.budget is not None and device.has_counter else 0
        if self._steps_to_measure:
            device.reset_peak()

    def _run_measured(self, iterator: Any) -> Any:
        """Run the training function; after the first steps under a plan, hold what each took against the budget.

        The counter's peak goes on from step to step, since others may read it. A step that raises it is the widest.
        """
        before_bytes = self._measured_on.peak_bytes if self._steps_to_measure else 0
        result = self._run(iterator)
        if self._steps_to_measure and self._rewritten is not None:
            self._steps_to_measure -= 1
            for value in tf.nest.flatten(result)[:1]:
                np.asarray(value)  # Wait for the device.
            plan, peak_bytes = self._rewritten.plan, self._measured_on.peak_bytes
            if plan.measured_peak_bytes is None or peak_bytes > before_bytes:
                self._judge(plan, peak_bytes)
        return result

    def _trace_again(self) -> None:
        """At the next call; the largest shapes of the data are known still."""
        shapes = self._shapes
        self._make_train_function(force=True)
        self._shapes = shapes

    def _judge(self, plan: Plan, measured_bytes: int) -> None:
        """Plan again for a budget that was broken, once; say so where that is no remedy.

        Raises:
            PlanMismatch: in the latter case, where the limit is strict.
        """
        if plan.measured_peak_bytes is None:
            plan.set_measured_peak(measured_bytes)
        if not exceeds(plan, measured_bytes):
            return
        self._steps_to_measure = 0
        if self._replans and self._promised_bytes is None and not self._chooses:
            self._promised_bytes = plan.budget_bytes
            self._broken = dataclasses.replace(plan, measured_peak_bytes=None)
            # By what was not predicted, so that the same plan is not found again.
            self._lowered_bytes = max(1, plan.budget_bytes - (measured_bytes - plan.peak_bytes))
            self._trace_again()
            return
        tell(broken_budget(plan, measured_bytes, None, compared=False), strict=self._strict)

    def _remember(self, rewritten: Rewritten) -> None:
        if self._whole_peak_bytes is not None:
            plan = dataclasses.replace(rewritten.plan, baseline_peak_bytes=self._whole_peak_bytes)
            rewritten = dataclasses.replace(rewritten, plan=plan)
        # Pieces of two sizes have a plan each.
        if self._rewritten is None or rewritten.plan.peak_bytes > self._rewritten.plan.peak_bytes:
            self._rewritten = rewritten

    @staticmethod
    def _real_shapes(symbols: Sequence[tf.Tensor], shapes: Shapes) -> dict[str, tuple[int, ...]]:
        if len(symbols) != len(shapes):
            return {}
        return {symbol.name: shape for symbol, shape in zip(symbols, shapes, strict=True)}


def build(model: keras.Model, batch: Any) -> None:
    """Make every variable now.

    What is created while a function is traced is allocated in the middle of its first step, where no plan can
    account for it.
    """
    if unbuilt_parts(model):
        model._symbolic_build(data_batch=unpacked(batch))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def assign(variable: keras.Variable, value: Array) -> None:
    """Give a variable a value in memory of its own.

    Handed over as it is, an array may become the variable's memory, which the device then does not count.
    """
    variable.assign(tf.raw_ops.DeepCopy(x=value))


def _forward_ends(graph: Any) -> int | None:
    """How many operations stand before the first of the backward pass, which tapes put into a scope of their own."""
    names = [op.name for op in graph.get_operations()]
    return next((number for number, name in enumerate(names) if name.startswith("gradient_tape/")), None)
