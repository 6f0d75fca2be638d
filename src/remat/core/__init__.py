"""What a training step, a schedule of it and a plan are. Imports no framework and no planner.

Read in this order: ``graph``, ``schedule``, ``simulator``, ``validator``, ``plan``.
"""
