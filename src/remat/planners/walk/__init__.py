"""Simulated annealing over schedules. Read ``lives``, ``slots``, ``board``, ``edits``, ``annealing`` in this order."""
