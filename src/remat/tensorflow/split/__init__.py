"""A region of a function in slices: how TensorFlow's operations can be cut, and the copies that make the slices."""
