"""A model of Keras for the zoo: ``train_on_batch`` of a model and a batch, its memory counted from outside of remat.

On JAX the compiler says what a program takes: arrays of the step before are freed while the next one runs, so that no
counter around a step tells them apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import keras
import numpy as np

import remat.keras
from benchmarks.zoo.frame.heap import most_in, most_in_small_blocks
from benchmarks.zoo.frame.listening import listening
from benchmarks.zoo.frame.measure import difference
from benchmarks.zoo.frame.subject import PLAIN, Array, Prepared, Subject

SCOPE: Final = "keras.RematScope"

_STEPS: Final = 4
"""Steps of which the widest counts, since TensorFlow orders the operations of each as it likes."""

_STEPS_OF_A_FIRST_PLAN: Final = 9
"""Steps after which TensorFlow's plan is the one that stays: eight that are held against the budget, and a trace."""

_SMALL_BYTES: Final = 256 << 10
"""Below which TensorFlow's counter of a CPU's memory leaves blocks out."""

_ROUNDING: Final = 2.0**-23
"""By what share weights differ that differ by rounding."""


class KerasModel(Subject):
    """A model that Keras trains.

    Args:
        make: builds the model; random weights come from a fixed seed.
        x: of a batch, or several of them by name.
        y: its classes.
        policy: the dtype policy to build under.
    """

    peers = (SCOPE,)

    def __init__(self, make: Callable[[], Any], x: Array | dict[str, Array], y: Array, policy: str = "float32") -> None:
        self._make, self._x, self._y, self._policy = make, x, y, policy
        self.captures = keras.backend.backend() == "torch"

    def peer(self, method: str) -> Prepared:
        """The plain step, or the one of a model that was built in Keras' own scope."""
        return self._prepared(None, None if method == PLAIN else keras.RematScope(mode="full"))

    def planned(self, budget: int | str) -> Prepared:
        """The step under ``limit_memory``, measured once its plan is the one that stays."""
        return self._prepared(budget)

    @property
    def batch(self) -> tuple[Any, Array]:
        """What ``train_on_batch`` is given."""
        return self._x, self._y

    def compiled(self, scope: AbstractContextManager[Any] | None = None) -> Any:
        """The model, its weights those of a fixed seed, ready to train.

        Args:
            scope: that it is built in, if any.
        """
        keras.utils.set_random_seed(0)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self._policy)
        try:
            with scope or nullcontext():
                model = self._make()
        finally:
            keras.config.set_dtype_policy(before)
        # SGD: Adam would blow rounding of tiny gradients up into whole steps.
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile="auto" if keras.backend.backend() == "jax" else False,
        )
        model.optimizer.build(model.trainable_variables)
        return model

    def _prepared(self, budget: int | str | None, scope: AbstractContextManager[Any] | None = None) -> Prepared:
        model = self.compiled(scope)
        program = None
        if budget is not None:
            remat.keras.limit_memory(model, budget)
        elif keras.backend.backend() == "jax":
            program = _JaxProgram(model)
            model.train_function = model._make_function(program)
        variables = {id(v): v for v in (*model.variables, *model.optimizer.variables)}.values()
        start = [keras.ops.convert_to_numpy(v).copy() for v in variables]

        def step() -> None:
            model.train_on_batch(self._x, self._y)

        def from_the_start(factor: float = 1.0) -> None:
            keras.utils.set_random_seed(0)  # On PyTorch dropout draws from its generator, which is no variable.
            for variable, value in zip(variables, start, strict=True):
                is_number = np.issubdtype(value.dtype, np.floating)
                variable.assign(value * value.dtype.type(factor) if is_number else value)
            gc.collect()

        def results(factor: float = 1.0) -> list[Array]:
            from_the_start(factor)
            weights = [np.asarray(keras.ops.convert_to_numpy(v), np.float64) for v in model.trainable_variables]
            step()
            after = [np.asarray(keras.ops.convert_to_numpy(v), np.float64) for v in model.trainable_variables]
            # As one array: where BatchNormalization takes a bias out again, its own change is rounding and no more.
            return [np.concatenate([(a - w).ravel() for a, w in zip(after, weights, strict=True)])]

        with listening() as said:
            started = time.process_time()
            step()
            first_s = time.process_time() - started
            from_the_start()
            # Variables share the memory of the arrays that they were set from until they are written anew. And on
            # TensorFlow the first steps may show that the budget holds a cheaper plan, which is the one to measure.
            may_change = budget is not None and keras.backend.backend() == "tensorflow"
            for _ in range(_STEPS_OF_A_FIRST_PLAN if may_change else 1):
                step()
            plan = None if budget is None else remat.keras.plan_of(model)
            beside_bytes = 0
            if keras.backend.backend() == "jax":
                peak_bytes = _bytes_in_jax(plan, program)
            else:
                held = [value.nbytes for value in start] + _gradients_bytes(model)
                peak_bytes, beside_bytes = _peak_bytes(step, held)
                plan = None if budget is None else remat.keras.plan_of(model)
        return Prepared(
            peak_bytes=peak_bytes,
            beside_bytes=beside_bytes,
            run=step,
            results=results,
            planning_s=0.0 if plan is None else first_s,
            compiling_s=0.0 if plan is not None else first_s,
            predicted=None if plan is None else plan.expected_overhead,
            predicted_bytes=None if plan is None else plan.peak_bytes,
            budget_bytes=None if plan is None else plan.budget_bytes,
            said=" ".join(said),
            sensitivity=difference(results(1 + _ROUNDING), results()) if plan is None else None,
        )


class _JaxProgram:
    """Keras' step as one program of JAX, with what ``jax.checkpoint`` needs on a CPU."""

    def __init__(self, model: Any) -> None:
        import remat.jax

        self._step = remat.jax.jit(model.train_step, donate_argnums=0)
        self.peak_bytes = 0

    def __call__(self, state: Any, data: Any) -> Any:
        from remat.jax.peak import peak_of

        if not self.peak_bytes:
            self.peak_bytes = peak_of(self._step.lower(state, data).compile().memory_analysis())
        return self._step(state, data)


def _bytes_in_jax(plan: remat.Plan | None, program: _JaxProgram | None) -> int:
    """What the compiler says of the program that ran."""
    measured = plan.measured_peak_bytes if plan is not None else program.peak_bytes if program is not None else None
    assert measured, "no program has run"
    return measured


def _gradients_bytes(model: Any) -> list[int]:
    """Of the gradients that a step begins with: on PyTorch Keras leaves those of the step before where they are."""
    gradients = (getattr(variable.value, "grad", None) for variable in model.trainable_variables)
    return [int(gradient.nbytes) for gradient in gradients if gradient is not None]


def _peak_bytes(step: Callable[[], None], held: Sequence[int]) -> tuple[int, int]:
    """The most bytes of a step, those among them that the model holds, and what the counter leaves out.

    With oneDNN TensorFlow keeps a heap of its own on a CPU, and counts it, without what is smaller than 256 KiB.
    """
    if keras.backend.backend() == "tensorflow":
        from remat.tensorflow.peak.device import current_device

        device = current_device()
        if device.has_counter:
            device.reset_peak()
            for _ in range(_STEPS - 1):
                step()
            small_bytes = most_in_small_blocks(step)
            return device.peak_bytes, small_bytes + sum(size for size in held if size < _SMALL_BYTES)
    return most_in(step) + sum(held), 0
