"""Changes of a step before it is planned: ops that run slice by slice, updates that run early, what frees memory first.

``separable`` finds what can be cut, ``inner`` what can be cut once its forward ops are copied to the backward part, and
``split`` says in which order the slices run. All three see calls, values, axes and bytes, never an array: a front end
hands in what it knows of its operators, and writes the slices itself.
"""
