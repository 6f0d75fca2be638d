"""Keras on JAX."""
