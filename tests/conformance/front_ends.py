"""One adapter for each front end: what the common checks need to say in its framework's own words.

A new front end adds a class here and its name to ``FRONT_ENDS``; the checks stay as they are.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Loss = Callable[..., Any]

# For steps of a dozen layers.
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
        rounding: largest difference of a gradient, as a share of its largest value.
    """

    name: str
    accuracy: float
    rounding = 2e-5

    @property
    def verbs(self) -> Any:
        """The front end itself."""
        return importlib.import_module(f"remat.{self.name}")

    @abc.abstractmethod
    def array(self, value: Any) -> Any:
        """A NumPy array in the framework."""

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
    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None) -> Step:
        """The gradient step of a loss, plain or planned."""

    @abc.abstractmethod
    def micro_batched(self, loss: Loss, count: int, reduction: str) -> Callable[..., tuple[Any, Sequence[Any]]]:
        """(parameters, *batch) to (value, gradients) of the whole batch, one micro-batch in memory at a time."""

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

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None) -> Step:
        return _JaxStep(self, loss, budget, plan)

    def micro_batched(self, loss: Loss, count: int, reduction: str) -> Callable[..., tuple[Any, Sequence[Any]]]:
        return self.jax.jit(self.verbs.value_and_grad(loss, micro_batches=count, reduction=reduction))


class _JaxStep(Step):
    def __init__(self, front_end: Jax, loss: Loss, budget: int | str | None, plan: Any) -> None:
        self._gradient: Any = front_end.jax.value_and_grad(loss)
        if budget is not None or plan is not None:
            self._gradient = front_end.verbs.value_and_grad(loss, budget=budget, plan=plan, **PLANNING)
        self._jitted = front_end.jax.jit(self._gradient)

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

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None) -> Step:
        return _TensorFlowStep(self, loss, budget, plan)

    def micro_batched(self, loss: Loss, count: int, reduction: str) -> Callable[..., tuple[Any, Sequence[Any]]]:
        tf = self.tf

        def run(params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
            variables = [tf.Variable(value) for value in params]
            gradient = self.verbs.value_and_grad(
                lambda *part: loss(variables, *part), variables, micro_batches=count, reduction=reduction
            )
            return tf.function(gradient)(*batch)

        return run

    def peak_bytes(self, step: Step, params: Sequence[Any], *batch: Any) -> int:
        from remat.tensorflow.peak.device import current_device

        # The counter is that of the process: what other tests have left in memory is not the step's, and their garbage
        # must not go while it is measured.
        there = current_device().in_use_bytes
        own = sum(int(np.prod(t.shape)) * t.dtype.size for t in (*params, *batch))
        return super().peak_bytes(step, params, *batch) - max(0, there - own)


class _TensorFlowStep(Step):
    def __init__(self, front_end: TensorFlow, loss: Loss, budget: int | str | None, plan: Any) -> None:
        tf = front_end.tf
        self._tape: Any = None

        def run(params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
            if budget is None and plan is None:
                tape = tf.GradientTape()
            else:
                tape = self._tape = front_end.verbs.GradientTape(budget=budget, plan=plan, **PLANNING)
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

    def step(self, loss: Loss, *, budget: int | str | None = None, plan: Any = None) -> Step:
        return _TorchStep(self, loss, budget, plan)

    def micro_batched(self, loss: Loss, count: int, reduction: str) -> Callable[..., tuple[Any, Sequence[Any]]]:
        def run(params: Sequence[Any], *batch: Any) -> tuple[Any, Sequence[Any]]:
            _without_gradients(params)
            step = self.verbs.micro_batches(functools.partial(loss, params), count, reduction=reduction)
            return step(*batch), [p.grad for p in params]

        return run

    def traced(self, loss: Loss, params: Sequence[Any], *batch: Any) -> Any:
        _without_gradients(params)
        return self.verbs.trace(functools.partial(loss, params), *batch)


class _TorchStep(Step):
    def __init__(self, front_end: Torch, loss: Loss, budget: int | str | None, plan: Any) -> None:
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
            self._plan = verbs.plan(loss, *batch, budget=self._budget, plan=self._given, **PLANNING)
        with contextlib.nullcontext() if self._plan is None else verbs.apply(self._plan):
            value = loss(*batch)
        value.backward()
        return value.detach(), [p.grad for p in params]

    @property
    def plan(self) -> Any:
        return self._plan


def _without_gradients(params: Sequence[Any]) -> None:
    for parameter in params:
        parameter.requires_grad_()
        parameter.grad = None


FRONT_ENDS: dict[str, type[FrontEnd]] = {"jax": Jax, "tensorflow": TensorFlow, "torch": Torch}
