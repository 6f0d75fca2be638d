"""A region of a step in slices: how JAX's primitives can be cut, and the loop over the slices."""
