"""TensorFlow: plan a ``tf.function`` within a byte budget and rewrite it in place, with the same numbers."""

from remat.running.supported import TENSORFLOW, check_version

check_version(TENSORFLOW)  # The imports below reach for symbols that move between versions.

from remat.running.measurement import Measurement
from remat.tensorflow.api.gradients import (
    gradients,
    gradients_collection,
    gradients_memory,
    gradients_speed,
    last_plan,
    replaced_gradients,
)
from remat.tensorflow.api.tape import GradientTape
from remat.tensorflow.api.value_and_grad import value_and_grad
from remat.tensorflow.check import check
from remat.tensorflow.measure import measure
from remat.tensorflow.recompute.decorator import recompute
from remat.tensorflow.trace.trace import trace

__all__ = [
    "GradientTape",
    "Measurement",
    "check",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "last_plan",
    "measure",
    "recompute",
    "replaced_gradients",
    "trace",
    "value_and_grad",
]
