"""The zoo of JAX: each model's plain step, ``jax.checkpoint`` around its blocks, and remat."""

from benchmarks.zoo.jax.models import MODELS

__all__ = ["MODELS"]
