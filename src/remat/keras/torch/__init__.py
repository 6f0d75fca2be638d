"""Keras on PyTorch."""
