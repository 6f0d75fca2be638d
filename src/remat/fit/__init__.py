"""From what a user asked to a plan that fits what really runs; the same way in every front end.

Read in this order: ``request`` (what was asked), ``peaks`` (what a device shows), ``candidate`` (what a front end
supplies), ``fit`` (a budget -> a plan), ``loop`` (the budget that the planner is given, corrected until it fits).
"""
