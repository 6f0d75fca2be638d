"""One training step on fake tensors, recorded -> Graph."""
