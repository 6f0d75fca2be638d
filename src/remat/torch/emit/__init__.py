"""A plan -> the training step, in eager PyTorch.

Read in this order: ``eager_order`` turns a schedule into one that eager PyTorch can run, ``planned_step`` watches the
forward pass and serves the backward pass, ``recipes`` make a storage again.
"""
