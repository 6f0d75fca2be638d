"""Cutting a batch into micro-batches, whatever the framework: one update with the numbers of the whole batch.

Read in this order: ``cut`` (how many samples each micro-batch has), ``reduce`` (what the batch's loss is of theirs),
``choose`` (how many of them cost least within a budget), ``options`` (what was looked at, as it is printed), ``timing``
(seconds that are measured for the choice).
"""
