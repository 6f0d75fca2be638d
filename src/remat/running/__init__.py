"""Training steps that are really run, whatever the framework.

Read in this order: ``workload`` (a step that ``remat plan``, ``measure`` and ``check`` can run), ``check`` (plain
against planned training), ``measurement`` (what ``measure`` returns), ``cost_model`` and ``calibration`` (seconds per
operation, predicted and timed), ``process`` (jobs in a process of their own), ``machine`` (memory and versions),
``recompute_switch`` (the environment's switch for ``recompute``), ``supported`` (the versions of frameworks),
``examination`` (what ``remat doctor`` finds).
"""
