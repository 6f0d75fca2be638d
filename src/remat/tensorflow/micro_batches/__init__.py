"""Micro-batches in TensorFlow: the loop, the sums, and how many pieces."""
