"""A training step on many devices, planned on one that has none of them."""
