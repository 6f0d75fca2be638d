"""JAX: plan what ``jax.jit`` compiles within a byte budget, with the same numbers.

gradients = remat.jax.value_and_grad(loss, budget="60%")   # in place of jax.value_and_grad
step = remat.jax.jit(step)                                 # in place of jax.jit
block = remat.jax.recompute(block)                         # in place of jax.checkpoint
"""

from remat.running.supported import JAX, check_version

check_version(JAX)  # The imports below reach for symbols that move between versions.

from remat.jax.api.jit import Jitted, jit
from remat.jax.api.value_and_grad import Grad, Gradient, grad, value_and_grad
from remat.jax.measure import measure
from remat.jax.recompute import recompute
from remat.jax.trace.graph import trace
from remat.jax.workload import check
from remat.running.measurement import Measurement

__all__ = [
    "Grad",
    "Gradient",
    "Jitted",
    "Measurement",
    "check",
    "grad",
    "jit",
    "measure",
    "recompute",
    "trace",
    "value_and_grad",
]
