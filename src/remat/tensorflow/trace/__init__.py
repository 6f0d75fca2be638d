"""A traced TensorFlow function -> Graph.

Read in this order: ``trace`` is what a user calls, ``func_graph`` turns operations into ops, ``labels`` names them.
``which_run``, ``sizes`` and ``op_facts`` know TensorFlow's operations.
"""
