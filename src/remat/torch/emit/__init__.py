"""A plan -> the training step, in eager PyTorch.

Read in this order: ``eager_order`` turns a schedule into one that eager PyTorch can run, ``planned_forward`` is what is
known of the forward pass beforehand, ``planned_step`` watches it, ``out_of_step`` notes what the plan does not have,
``backward_reads`` serves the backward pass, ``recipes`` make a storage again.
"""
