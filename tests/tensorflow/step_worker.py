"""Trains one model plainly and under several budgets, and prints what happened as JSON.

A process of its own, because the device's counter of memory sees everything that the process ever holds.

    python step_worker.py CASE tape|fit BUDGET... [--jit]        # a BUDGET is "70%", a number of bytes, or "minimum"
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from models import CASES, LARGE, Case

import remat
from remat.core.plan import Plan
from remat.keras.limit import _limit_of
from remat.tensorflow import GradientTape
from remat.tensorflow.emit.emit import Rewritten
from remat.tensorflow.peak.device import current_device

STEPS = 3
Arrays = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Trained:
    """What three steps left behind.

    Attributes:
        gradients: of every step, one list per step; empty where the step does not give them out.
        losses: of every step.
        variables: every variable of the model and the optimizer, by path: weights, slots (the optimizer's arrays) and
            states (all else: statistics, seeds, counters).
        peak_bytes: of the device's counter, over the three steps.
        step_s: median seconds of the steps after the first.
        trace_s: seconds of tracing, planning included.
        copies: recomputations that the traced function holds.
        plan: what was planned.
        largest_bytes: the size of the step's largest tensor.
    """

    gradients: list[Arrays]
    losses: list[float]
    variables: dict[str, np.ndarray[Any, Any]]
    peak_bytes: int
    step_s: float
    trace_s: float
    copies: int
    plan: Plan | None
    largest_bytes: int


@dataclass(frozen=True)
class Differences:
    """Two trainings of the same model from the same batches.

    Attributes:
        first_gradients: of the first step, relative to the largest gradient.
        gradients: of all steps; 0 where the step does not give them out.
        losses: absolute.
        weights: and optimizer slots, after the last step, relative to the largest.
        statistics: relative to each statistic's own scale; a mean's is the deviation where that is larger.
        statistics_count: how many floating-point states there are.
        unequal_states: names of the integer states (seeds, counters) that differ.
        states_count: how many integer states there are.
    """

    first_gradients: float
    gradients: float
    losses: float
    weights: float
    statistics: float
    statistics_count: int
    unequal_states: list[str]
    states_count: int


@dataclass(frozen=True)
class Outcome:
    """One budget against plain training.

    ``sensitivity`` compares plain training with itself, its first weights off by half a rounding: what no two ways to
    compute the same can be expected to stay below.
    """

    budget: str
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    plain_measured_bytes: int
    plain_predicted_bytes: int
    largest_bytes: int
    recomputed: int
    copies: int
    overhead: float
    plan_s: float
    trace_s: float
    step_s: float
    plain_step_s: float
    differences: Differences
    sensitivity: Differences


@dataclass(frozen=True)
class Refused:
    """A budget that no plan fits."""

    budget: str
    minimum_bytes: int
    binding_op: str
    infeasible: bool = True


class Trainer:
    """One model and optimizer, set back to their first values before every training.

    A new model for each budget would not do: in TensorFlow 2.21 the variables of a model stay allocated once its
    optimizer has stepped inside a function, whoever lets go of them.
    """

    def __init__(self, case: Case, jit: bool) -> None:
        self.case = case
        self.jit = jit
        self.model = case.model()
        self.optimizer = case.optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self.first = {number: v.numpy().copy() for number, v in enumerate(self._all_variables())}
        self.batches = [tuple(tf.constant(part) for part in case.batch(seed)) for seed in range(STEPS)]

    def train(self, how: str, budget: int | str | None, nudge: bool = False) -> Trained:
        """Three steps from the first values, or from values that are off by about one rounding."""
        random = np.random.default_rng(11)
        trainable = {id(v) for v in self.model.trainable_variables}
        for number, variable in enumerate(self._all_variables()):
            value = self.first[number]
            if nudge and id(variable) in trainable:
                value = value * (1 + np.finfo(value.dtype).eps * random.choice([-0.5, 0.5], value.shape))
            # Handed over as it is, an array may become the variable's memory, which the device then does not count.
            variable.assign(tf.raw_ops.DeepCopy(x=value.astype(self.first[number].dtype)))
        gc.collect()
        return self._with_tape(budget) if how == "tape" else self._with_fit(budget)

    def _with_tape(self, budget: int | str | None) -> Trained:
        model, optimizer, loss = self.model, self.optimizer, self.case.loss()
        tapes = []

        @tf.function(jit_compile=self.jit)
        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            tape = tf.GradientTape() if budget is None else GradientTape(budget=budget)
            tapes.append(tape)
            with tape:
                value = loss(y, model(x, training=True))
                scaled = optimizer.scale_loss(value)
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value, [tf.convert_to_tensor(g) for g in gradients]

        started = time.perf_counter()
        traced = step.get_concrete_function(*self.batches[0])
        trace_s = time.perf_counter() - started
        device = current_device()
        device.reset_peak()
        gradients, losses, times = [], [], []
        for batch in self.batches:
            started = time.perf_counter()
            value, found = step(*batch)
            losses.append(float(value))
            times.append(time.perf_counter() - started)
            gradients.append([g.numpy().copy() for g in found])
            del found
        peak = device.peak_bytes
        assert len(tapes) == 1, "traced more than once"
        return Trained(
            gradients,
            losses,
            self._values(),
            peak,
            float(np.median(times[1:])),
            trace_s,
            _copies(traced.graph),
            None if budget is None else tapes[0].plan,
            0 if budget is None else _largest_bytes(tapes[0]._rewritten),
        )

    def _with_fit(self, budget: int | str | None) -> Trained:
        model = self.model
        model.compile(self.optimizer, self.case.loss(), jit_compile=self.jit)
        remat.keras.limit_memory(model, budget)
        data = tf.data.Dataset.from_generator(
            lambda: iter(self.batches),
            output_signature=tuple(tf.TensorSpec((None, *t.shape[1:]), t.dtype) for t in self.batches[0]),
        )
        losses = _Losses()
        device = current_device()
        device.reset_peak()
        started = time.perf_counter()
        model.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=[losses])
        total_s = time.perf_counter() - started
        peak = device.peak_bytes
        limit = None if budget is None else _limit_of(model)
        return Trained(
            [],
            losses.values,
            self._values(),
            peak,
            float(np.median(np.diff(losses.times))),
            total_s,
            0 if limit is None else _copies(limit.rewritten.step.operations[0].graph),
            None if limit is None else limit.plan,
            0 if limit is None else _largest_bytes(limit.rewritten),
        )

    def _all_variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.optimizer.variables]

    def _values(self) -> dict[str, np.ndarray[Any, Any]]:
        trainable = {id(v) for v in self.model.trainable_variables}
        slots = {id(v) for v in self.optimizer.variables if v.shape}

        def kind(variable: keras.Variable) -> str:
            return "weight" if id(variable) in trainable else "slot" if id(variable) in slots else "state"

        return {f"{kind(v)} {number} {v.path}": v.numpy().copy() for number, v in enumerate(self._all_variables())}


def _copies(graph: tf.Graph) -> int:
    return sum("_remat_copy" in op.node_def.attr for op in graph.get_operations())


def _largest_bytes(rewritten: Rewritten) -> int:
    graph = rewritten.step.graph
    pinned = {graph.roots[t] for t in graph.inputs}
    return max(t.size_bytes for n, t in enumerate(graph.tensors) if t.alias_of is None and n not in pinned)


class _Losses(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.values.append(float(logs["loss"]))
        self.times.append(time.perf_counter())


def difference_to_largest(found: Arrays, plain: Arrays) -> float:
    """The largest difference of two lists of arrays, relative to the largest value of all plain ones.

    For gradients and weights: some are zero but for rounding (the bias of attention's keys).
    """
    assert [a.shape for a in found] == [a.shape for a in plain]
    difference = max(float(np.max(np.abs(a - b))) for a, b in zip(found, plain, strict=True))
    assert np.isfinite(difference)
    return difference / max(float(np.max(np.abs(b))) for b in plain)


def statistics_difference(found: Arrays, plain: Arrays, names: list[str]) -> float:
    """The largest difference of running statistics, each relative to its own scale."""
    by_name = dict(zip((name.partition(" ")[2].partition(" ")[2] for name in names), plain, strict=True))
    worst = 0.0
    for (path, expected), array in zip(by_name.items(), found, strict=True):
        scale = float(np.max(np.abs(expected)))
        if path.endswith("moving_mean"):
            scale = max(scale, float(np.sqrt(np.max(by_name[path.replace("moving_mean", "moving_variance")]))))
        worst = max(worst, float(np.max(np.abs(array - expected))) / (scale or 1.0))
    assert np.isfinite(worst)
    return worst


def differences(found: Trained, plain: Trained) -> Differences:
    assert found.variables.keys() == plain.variables.keys()
    # Integer states are counters and seeds: steps taken, random numbers drawn.
    exact = [n for n, v in plain.variables.items() if not np.issubdtype(v.dtype, np.floating)]
    statistics = [n for n in plain.variables if n.startswith("state") and n not in exact]

    def values(of: Trained, names: list[str]) -> Arrays:
        return [of.variables[n] for n in names]

    def of_kind(kind: str) -> float:
        names = [n for n in plain.variables if n.startswith(kind)]
        return difference_to_largest(values(found, names), values(plain, names))

    gradients = [difference_to_largest(a, b) for a, b in zip(found.gradients, plain.gradients, strict=True)]
    return Differences(
        first_gradients=gradients[0] if gradients else 0.0,
        gradients=max(gradients, default=0.0),
        losses=float(np.max(np.abs(np.subtract(found.losses, plain.losses)))),
        weights=max(of_kind("weight"), of_kind("slot")),
        statistics=statistics_difference(values(found, statistics), values(plain, statistics), statistics),
        statistics_count=len(statistics),
        unequal_states=[n for n in exact if not np.array_equal(found.variables[n], plain.variables[n])],
        states_count=len(exact),
    )


def compare(budget: str, found: Trained, plain: Trained, sensitivity: Differences) -> Outcome:
    assert found.plan is not None
    return Outcome(
        budget=budget,
        budget_bytes=found.plan.budget_bytes,
        predicted_bytes=found.plan.peak_bytes,
        measured_bytes=found.peak_bytes,
        plain_measured_bytes=plain.peak_bytes,
        plain_predicted_bytes=found.plan.baseline_peak_bytes,
        largest_bytes=found.largest_bytes,
        recomputed=found.plan.recomputed,
        copies=found.copies,
        overhead=found.plan.overhead,
        plan_s=found.plan.plan_seconds,
        trace_s=found.trace_s,
        step_s=found.step_s,
        plain_step_s=plain.step_s,
        differences=differences(found, plain),
        sensitivity=sensitivity,
    )


def main(name: str, how: str, budgets: list[str], jit: bool) -> list[dict[str, Any]]:
    if not jit:  # Keras leaves XLA off where determinism is asked for; XLA's programs for a CPU are deterministic.
        tf.config.experimental.enable_op_determinism()
    trainer = Trainer((CASES | LARGE)[name], jit)
    # Under XLA all temporary memory is one block, and which chunk it gets depends on what ran before: nothing does.
    early = [_limited(trainer, how, budget) for budget in budgets] if jit else []
    plain = trainer.train(how, None)
    sensitivity = differences(trainer.train(how, None, nudge=True), plain)
    results: list[dict[str, Any]] = []
    for number, budget in enumerate(budgets):
        found = early[number] if jit else _limited(trainer, how, budget)
        results.append(asdict(found if isinstance(found, Refused) else compare(budget, found, plain, sensitivity)))
        del found
    return results


def _limited(trainer: Trainer, how: str, budget: str) -> Trained | Refused:
    try:
        wanted: int | str = int(budget) if budget.isdigit() else budget
        if budget == "minimum":
            wanted = minimum_bytes(trainer, how)
        return trainer.train(how, wanted)
    except remat.InfeasibleBudget as error:
        return Refused(budget, error.minimum_bytes, error.binding_op)


def minimum_bytes(trainer: Trainer, how: str) -> int:
    try:
        trainer.train(how, 1)
    except remat.InfeasibleBudget as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--jit"]
    print(json.dumps(main(arguments[0], arguments[1], arguments[2:], "--jit" in sys.argv)))
