"""A Keras model as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

import keras

from remat.errors import UnsupportedStep
from remat.keras.compiling import compile_if_needed
from remat.workload import StepOptions, Workload


def make_workload(made: keras.Model, options: StepOptions) -> Workload:
    """The training step of a model, compiled with the loss and the optimizer of ``options`` where it is not.

    Raises:
        UnsupportedStep: for a backend of Keras that remat does not support.
    """
    compile_if_needed(made, options.loss, options.optimizer)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from remat.keras.tensorflow_workload import TensorFlowWorkload

        return TensorFlowWorkload(made, options)
    if backend == "jax":
        from remat.keras.jax_workload import JaxWorkload

        return JaxWorkload(made, options)
    raise UnsupportedStep(
        f"the active backend of Keras is {backend!r}; set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax"
    )
