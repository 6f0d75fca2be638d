"""A traced TensorFlow function -> Graph."""
