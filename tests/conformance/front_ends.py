"""One adapter for each front end: what the common checks need to say in its framework's own words.

A new front end adds a class here and its name to ``FRONT_ENDS``; the checks stay as they are.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import remat

Loss = Callable[..., Any]

Values = Callable[[Any, Any], Any]
"""(parameters, x) to one number for each sample."""

# "auto" searches steps of a dozen layers; a check that is not about the search names a quicker planner.
PLANNING: dict[str, Any] = {"time_limit_s": 0.5}


class Step(abc.ABC):
    """A compiled gradient step: (parameters, *batch) to (value, gradients)."""

    @abc.abstractmethod
    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        """One step."""

    @property
    @abc.abstractmethod
    def plan(self) -> Any:
        """The plan in force once the step has run; None for a plain one."""


class FrontEnd(abc.ABC):
    """What differs between frameworks.

    Attributes:
        name: of the folder in ``remat``.
        accuracy: how far a predicted peak may be from the measured one.
        kept_share: of the plain peak, the budget that a chain is asked to keep.
        rounding: largest difference of a gradient, as a share of its largest value.
    """

    name: str
    accuracy: float
    rounding = 2e-5
    kept_share = "65%"

    @property
    def verbs(self) -> Any:
        """The front end itself."""
        return importlib.import_module(f"remat.{self.name}")

    @abc.abstractmethod
    def array(self, value: Any) -> Any:
        """A NumPy array in the framework."""

    def numpy(self, value: Any) -> Any:
        """An array of the framework in NumPy."""
        return np.asarray(value)

    @abc.abstractmethod
    def tanh(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def mean(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def sum(self, x: Any, axis: int | None = None) -> Any: ...

    @abc.abstractmethod
    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        """A dropout layer as users write it, freshly seeded: (x, source) to x, and the source if it is an argument."""

    @abc.abstractmethod
    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        """The gradient step of a loss, plain or planned."""

    @abc.abstractmethod
    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        """The gradient step of a batch, one micro-batch in memory at a time.

        For the reduction "ratio" the batch is (x, mask), and the loss the mean of the samples that the mask leaves.
        """

    def loss_of(self, values: Values, reduction: str) -> Loss:
        """The loss as ``micro_batches`` takes it: with "ratio" a pair (sum, denominator)."""
        if reduction == "ratio":
            return lambda params, x, mask: (self.sum(values(params, x) * mask), self.sum(mask))
        combine = self.mean if reduction == "mean" else self.sum
        return lambda params, x: combine(values(params, x))

    def whole(self, values: Values, reduction: str) -> Step:
        """The plain gradient step of the whole batch."""
        loss = self.loss_of(values, reduction)
        if reduction != "ratio":
            return self.step(loss)

        def quotient(params: Any, x: Any, mask: Any) -> Any:
            value, count = loss(params, x, mask)
            return value / count

        return self.step(quotient)

    def traced(self, loss: Loss, params: Sequence[Any], *batch: Any) -> Any:
        """The graph of the plain step."""
        return self.verbs.trace(self.step(loss), params, *batch)

    def peak_bytes(self, step: Step, params: Sequence[Any], *batch: Any) -> int:
        """The measured peak of a step."""
        return int(self.verbs.measure(step, params, *batch, repeats=1).peak_bytes)


class Jax(FrontEnd):
    name = "jax"
    accuracy = 0.0  # The figure is the compiler's own.

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp = jax, jnp

    def array(self, value: Any) -> Any:
        return self.jnp.asarray(value)

    def tanh(self, x: Any) -> Any:
        return self.jnp.tanh(x)

    def mean(self, x: Any) -> Any:
        return self.jnp.mean(x)

    def sum(self, x: Any, axis: int | None = None) -> Any:
        return self.jnp.sum(x, axis)

    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        random = self.jax.random

        def drop(x: Any, key: Any) -> Any:
            return self.jnp.where(random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)

        return drop, (random.key(seed, impl="rbg"),)

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        if budget is None and plan is None:
            return _JaxStep(self, self.jax.value_and_grad(loss))
        planning = {**PLANNING, **planning}
        return _JaxStep(self, self.verbs.value_and_grad(loss, budget=budget, plan=plan, **planning))

    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        loss = self.loss_of(values, reduction)
        gradient = self.verbs.value_and_grad(
            loss, micro_batches=count, reduction=reduction, budget=budget, **{**PLANNING, **planning}
        )
        return _JaxStep(self, gradient)


class _JaxStep(Step):
    def __init__(self, front_end: Jax, gradient: Any) -> None:
        self._gradient = gradient
        self._jitted = front_end.jax.jit(gradient)

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        return self._jitted(params, *batch)

    @property
    def plan(self) -> Any:
        return getattr(self._gradient, "plan", None)

    @property
    def lower(self) -> Any:
        return self._jitted.lower


class TensorFlow(FrontEnd):
    name = "tensorflow"
    accuracy = 0.2  # The allocator's rounding weighs more where there are few large tensors.

    def __init__(self) -> None:
        import tensorflow as tf

        self.tf = tf

    def array(self, value: Any) -> Any:
        return self.tf.constant(value)

    def tanh(self, x: Any) -> Any:
        return self.tf.tanh(x)

    def mean(self, x: Any) -> Any:
        return self.tf.reduce_mean(x)

    def sum(self, x: Any, axis: int | None = None) -> Any:
        return self.tf.reduce_sum(x, axis)

    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        generator = self.tf.random.Generator.from_seed(seed)

        def drop(x: Any, _: Any = None) -> Any:
            return self.tf.where(generator.uniform(x.shape) < 0.8, x / 0.8, 0.0)

        return drop, ()

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        return _TensorFlowStep(self, loss, budget, plan, planning)

    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        planning = {} if budget is None else {**PLANNING, **planning, "budget": budget}
        return _TensorFlowMicroBatches(self, self.loss_of(values, reduction), count, reduction, planning)

    def peak_bytes(self, step: Step, params: Sequence[Any], *batch: Any) -> int:
        from remat.tensorflow.peak.device import current_device

        # The counter is that of the process: what other tests have left in memory is not the step's, and their garbage
        # must not go while it is measured.
        there = current_device().in_use_bytes
        own = sum(int(np.prod(t.shape)) * t.dtype.size for t in (*params, *batch))
        return super().peak_bytes(step, params, *batch) - max(0, there - own)


class _TensorFlowStep(Step):
    def __init__(
        self, front_end: TensorFlow, loss: Loss, budget: int | str | None, plan: Any, planning: dict[str, Any]
    ) -> None:
        tf = front_end.tf
        self._tape: Any = None

        def run(params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
            if budget is None and plan is None:
                tape = tf.GradientTape()
            else:
                tape = self._tape = front_end.verbs.GradientTape(budget=budget, plan=plan, **{**PLANNING, **planning})
            with tape:
                tape.watch(params)
                value = loss(params, *batch)
            return value, tape.gradient(value, params)

        self._function = tf.function(run)

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        return self._function(params, *batch)

    @property
    def plan(self) -> Any:
        return None if self._tape is None else self._tape.plan

    @property
    def get_concrete_function(self) -> Any:
        return self._function.get_concrete_function


class _TensorFlowMicroBatches(Step):
    def __init__(self, front_end: TensorFlow, loss: Loss, count: int, reduction: str, planning: dict[str, Any]) -> None:
        self._tf = front_end.tf
        self._loss = loss
        self._made = functools.partial(
            front_end.verbs.value_and_grad, micro_batches=count, reduction=reduction, **planning
        )
        self._variables: list[Any] = []
        self._function: Any = None
        self._plans: list[Any] = []

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        if self._function is None:
            self._variables = [self._tf.Variable(value) for value in params]
            gradient = self._made(lambda *piece: self._loss(self._variables, *piece), self._variables)
            self._function = self._tf.function(gradient)
        for variable, value in zip(self._variables, params, strict=True):
            variable.assign(value)
        with _noted_plans(self._plans):
            return self._function(*batch)

    @property
    def plan(self) -> Any:
        return self._plans[0] if self._plans else None


@contextlib.contextmanager
def _noted_plans(plans: list[Any]) -> Iterator[None]:
    """Adds the plans that are written into functions to the list: ``value_and_grad`` of TensorFlow only logs them."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple):
                plans.extend(value for value in record.args if isinstance(value, remat.Plan))

    logger, notes = logging.getLogger("remat"), Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)


class Torch(FrontEnd):
    name = "torch"
    accuracy = 0.05

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def array(self, value: Any) -> Any:
        return self.torch.from_numpy(value.copy())

    def tanh(self, x: Any) -> Any:
        return self.torch.tanh(x)

    def mean(self, x: Any) -> Any:
        return self.torch.mean(x)

    def sum(self, x: Any, axis: int | None = None) -> Any:
        return self.torch.sum(x) if axis is None else self.torch.sum(x, axis)

    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        # From the generator of the process, which planning must leave as it is.
        self.torch.manual_seed(seed)

        def drop(x: Any, _: Any = None) -> Any:
            return self.torch.nn.functional.dropout(x, 0.2)

        return drop, ()

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        return _TorchStep(self, loss, budget, plan, {**PLANNING, **planning})

    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        planning = {**PLANNING, **planning, "budget": budget}
        return _TorchMicroBatches(self, self.loss_of(values, reduction), count, reduction, planning)

    def traced(self, loss: Loss, params: Sequence[Any], *batch: Any) -> Any:
        _without_gradients(params)
        return self.verbs.trace(functools.partial(loss, params), *batch)


class _TorchStep(Step):
    def __init__(
        self, front_end: Torch, loss: Loss, budget: int | str | None, plan: Any, planning: dict[str, Any]
    ) -> None:
        self._planning = planning
        self._front_end = front_end
        self._loss = loss
        self._budget = budget
        self._given = plan
        self._plan: Any = None

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        verbs = self._front_end.verbs
        _without_gradients(params)
        loss = functools.partial(self._loss, params)
        if self._plan is None and (self._budget is not None or self._given is not None):
            self._plan = verbs.plan(loss, *batch, budget=self._budget, plan=self._given, **self._planning)
        with contextlib.nullcontext() if self._plan is None else verbs.apply(self._plan):
            value = loss(*batch)
        value.backward()
        return value.detach(), [p.grad for p in params]

    @property
    def plan(self) -> Any:
        return self._plan


class _TorchMicroBatches(Step):
    def __init__(self, front_end: Torch, loss: Loss, count: int, reduction: str, planning: dict[str, Any]) -> None:
        self._made = functools.partial(front_end.verbs.micro_batches, count=count, reduction=reduction, **planning)
        self._loss = loss
        self._step: Any = None

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        _without_gradients(params)
        if self._step is None:
            self._step = self._made(functools.partial(self._loss, params))
        return self._step(*batch), [p.grad for p in params]

    @property
    def plan(self) -> Any:
        return self._step.plans[0] if self._step is not None and self._step.plans else None


def _without_gradients(params: Sequence[Any]) -> None:
    for parameter in params:
        parameter.requires_grad_()
        parameter.grad = None


class Paddle(FrontEnd):
    """Runs in a process of its own: Paddle cannot be imported after TensorFlow."""

    name = "paddle"
    accuracy = 0.05
    # Paddle cuts a captured program in two, and keeps a batch's gradients apart from both.
    rounding = 2e-5

    def __init__(self) -> None:
        import paddle

        self.paddle = paddle

    def array(self, value: Any) -> Any:
        return self.paddle.to_tensor(value)

    def tanh(self, x: Any) -> Any:
        return self.paddle.tanh(x)

    def mean(self, x: Any) -> Any:
        return self.paddle.mean(x)

    def sum(self, x: Any, axis: int | None = None) -> Any:
        return self.paddle.sum(x, axis)

    def dropout(self, seed: int) -> tuple[Callable[[Any, Any], Any], tuple[Any, ...]]:
        # From the generator of the process, which planning must leave as it is.
        self.paddle.seed(seed)

        def drop(x: Any, _: Any = None) -> Any:
            return self.paddle.nn.functional.dropout(x, 0.2)

        return drop, ()

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None, **planning: Any) -> Step:
        planning = {**PLANNING, **planning, "budget": budget, "plan": plan}
        return _PaddleStep(self.verbs.value_and_grad(loss, batch_argnums=(1,), **planning))

    def micro_batched(
        self, values: Values, count: int, reduction: str, *, budget: int | str | None = None, **planning: Any
    ) -> Step:
        planning = {**PLANNING, **planning, "budget": budget, "reduction": reduction, "micro_batches": count}
        places = (1, 2) if reduction == "ratio" else (1,)
        return _PaddleStep(self.verbs.value_and_grad(self.loss_of(values, reduction), batch_argnums=places, **planning))

    def traced(self, loss: Loss, params: Sequence[Any], *batch: Any) -> Any:
        _with_gradients(params)
        return self.verbs.trace(loss, list(params), *batch)

    def peak_bytes(self, step: Step, params: Sequence[Any], *batch: Any) -> int:
        import gc

        from remat.paddle import _private

        # The counter sees the whole process; what was there before and is no part of the step is taken off. Right after
        # a step Paddle's thread has still to free up to 1 MiB of it, in 1 of 30 readings; 3 ms later never.
        gc.collect()
        time.sleep(0.01)
        there = _private.allocated_bytes()
        own = sum(int(np.prod(t.shape)) * t.element_size() for t in (*params, *batch))
        measured = self.verbs.measure(step, params, *batch, repeats=5).peak_bytes
        return int(measured - max(0, there - own))


class _PaddleStep(Step):
    def __init__(self, gradient: Any) -> None:
        self._gradient = gradient

    def __call__(self, params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
        _with_gradients(params)
        return self._gradient(list(params), *batch)

    @property
    def plan(self) -> Any:
        return self._gradient.plan


def _with_gradients(params: Sequence[Any]) -> None:
    for parameter in params:
        parameter.stop_gradient = False


FRONT_ENDS: dict[str, type[FrontEnd]] = {"jax": Jax, "tensorflow": TensorFlow, "torch": Torch, "paddle": Paddle}
