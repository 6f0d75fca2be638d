"""TensorFlow: plan a ``tf.function`` within a byte budget and rewrite it in place, with the same numbers."""

from remat.tensorflow.accumulate import value_and_grad
from remat.tensorflow.gradient_tape import GradientTape
from remat.tensorflow.measure import Measurement, measure
from remat.tensorflow.trace import trace

__all__ = ["GradientTape", "Measurement", "measure", "trace", "value_and_grad"]
