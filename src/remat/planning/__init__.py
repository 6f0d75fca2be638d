"""From a graph and a budget to a plan: find a schedule, prove how good it is, trace the frontier."""
