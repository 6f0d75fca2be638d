"""Changes of a step before it is planned: a region of ops that runs slice by slice.

``separable`` finds what can be cut, ``split`` says in which order the slices run. Both see calls, values, axes and
bytes, never an array: a front end hands in what it knows of its operators, and writes the slices itself.
"""
