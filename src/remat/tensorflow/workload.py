"""A TensorFlow function as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.running.workload import Array, NotAStep, StepOptions, Training, Workload, nudge
from remat.tensorflow.api.tape import GradientTape
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.trace import trace

_SEED = 11


def make_workload(made: tuple[Any, ...], options: StepOptions) -> Workload:
    """The training step of ``(loss function, *arguments)``: its value and its gradients for the variables it reads.

    Arguments are tensors, arrays or ``tf.TensorSpec``. With ``options.whole_step`` the function is a whole step, which
    can be planned but not rewritten from outside.

    Raises:
        NotAStep: for a function that returns no scalar where a loss is wanted.
    """
    function, *args = made
    options.refuse("TensorFlow", "inputs", "loss", "optimizer")
    return TensorFlowFunction(function, args, options)


class TensorFlowFunction:
    """See ``remat.running.workload.Workload``.

    Args:
        function: a loss, or a whole step.
        args: its arguments.
        options: whether it is a whole step.
    """

    framework = "tensorflow"

    def __init__(self, function: Callable[..., Any], args: list[Any], options: StepOptions) -> None:
        self._function = function
        self._args = args
        self._options = options
        self._variables: tuple[tf.Variable, ...] | None = None
        self._first: list[Array] = []

    @property
    def batch_size(self) -> int | None:
        """What the user said; the arguments alone know."""
        return self._options.batch_size

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        step = self._function if self._options.whole_step else self._step(None)
        return trace(step, *self._args, device=device)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run the loss and its gradients ``steps`` times; no optimizer moves the variables."""
        plans: list[Any] = []
        step, args = self._step(budget, plans), self._reset(nudged)
        step.get_concrete_function(*args)
        device = current_device()
        losses, times, peaks = [], [], []
        for _ in range(steps):
            if device.has_counter:
                device.reset_peak()
            started = time.perf_counter()
            loss, gradients = step(*args)
            losses.append(float(loss))
            del gradients
            times.append(time.perf_counter() - started)
            peaks.append(device.peak_bytes if device.has_counter else 0)
        variables = self._variables or ()
        values = {f"{_kind(v)}/{v.name}#{n}": v.numpy().copy() for n, v in enumerate(variables)}
        plan = None if budget is None else plans[-1].plan
        return Training(max(peaks), float(np.median(times[1:] or times)), tuple(losses), values, plan)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the variables that the loss reads."""
        step, args = self._step(budget), self._reset(nudged)
        _, gradients = step(*args)
        trainable = [v for v in self._variables or () if v.trainable]
        return {
            f"gradient/{v.name}#{n}": np.array(tf.convert_to_tensor(g))
            for n, (v, g) in enumerate(zip(trainable, gradients, strict=True))
            if g is not None
        }

    def restore(self) -> None:
        """Give the variables their first values."""
        for variable, value in zip(self._variables or (), self._first, strict=True):
            variable.assign(tf.raw_ops.DeepCopy(x=value))

    def _step(self, budget: int | str | None, tapes: list[Any] | None = None) -> Any:
        if self._options.whole_step:
            raise UnsupportedStep(
                "a whole TensorFlow step cannot be rewritten from outside; return its loss function, or put "
                "remat.tensorflow.GradientTape into the step"
            )

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step(*args: Any) -> Any:
            tape = tf.GradientTape() if budget is None else GradientTape(budget=budget)
            if tapes is not None:
                tapes.append(tape)
            with tape:
                loss = self._function(*args)
                _check_is_loss(self._function, loss)
            return loss, tape.gradient(loss, _watched(tape))

        return step

    def _reset(self, nudged: bool) -> list[Any]:
        random = np.random.default_rng(_SEED)
        args = [tf.nest.map_structure(lambda leaf: _array(leaf, random), arg) for arg in self._args]
        if self._variables is None:
            self._variables = tuple(self._step(None).get_concrete_function(*args).graph.variables)
            self._first = [v.numpy().copy() for v in self._variables]
        for variable, value in zip(self._variables, self._first, strict=True):
            moved = nudge(value, random) if nudged and variable.trainable else value
            variable.assign(tf.raw_ops.DeepCopy(x=moved))
        return args


def _watched(tape: tf.GradientTape) -> list[tf.Variable]:
    variables = list(tape.watched_variables())
    if not variables:
        raise NotAStep("the loss function reads no trainable tf.Variable, so there is nothing to differentiate")
    return variables


def _check_is_loss(function: Callable[..., Any], loss: Any) -> None:
    if isinstance(loss, tf.Tensor) and loss.shape.rank == 0 and loss.dtype.is_floating:
        return
    found = f"{loss.dtype.name}{loss.shape}" if isinstance(loss, tf.Tensor) else f"a {type(loss).__name__}"
    raise NotAStep(
        f"the function {getattr(function, '__name__', function)!r} returns {found}, no loss: a loss is one "
        "floating-point number. Return the mean or the sum of it"
    )


def _kind(variable: tf.Variable) -> str:
    if variable.trainable:
        return "weight"
    return "statistic" if variable.dtype.is_floating else "state"


def _array(leaf: Any, random: np.random.Generator) -> Any:
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    if leaf.dtype.is_floating:
        return tf.cast(random.normal(size=leaf.shape), leaf.dtype)
    return tf.cast(random.integers(0, 2, leaf.shape), leaf.dtype)
