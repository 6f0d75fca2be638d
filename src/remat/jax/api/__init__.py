"""What a user of JAX calls in place of ``jax.jit`` and ``jax.value_and_grad``."""
