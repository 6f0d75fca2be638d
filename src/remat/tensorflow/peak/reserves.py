"""The shares of a budget that plans leave unused on TensorFlow, for what no replay of a step on a heap shows."""

from __future__ import annotations

from typing import Final

UNSEEN: Final = 0.04
"""For what neither the allocator's model nor the compiler's figures contain.

Measured: of 34 plans with sixty steps each, the widest step took 4.1 % more than the highest peak in one, and 3.8 at
most in the others; none went above its budget (docs/tensorflow_peaks.md). Too small, a step goes above its budget; too
large, that share of the budget stays unused.
"""

UNSEEN_OF_LIKE_STEPS: Final = 0.025
"""The same where no order that is replayed changes anything, and every step takes what the first one takes.

Tensors that are not held in order come to 2 % of a peak at most (``emit._LIGHT_TOGETHER``).
"""

UNSEEN_ONE_BY_ONE: Final = 0.01
"""The same where, besides, each operation waits for the one before it.

Measured: of thirteen such plans with sixty steps each, none took more than was replayed.
"""

TAIL_IN_RESERVE: Final = 0.03
"""How much of ``UNSEEN`` may go to steps above the most of the runs that were replayed: the tail of these.

A judgement: what is left of it is as much as plans one by one need, of which no run is above another.
"""
