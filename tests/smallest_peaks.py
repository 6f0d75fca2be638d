"""How hard a refused budget's minimum is searched for, in tests of everything but the planners.

A planner that finds nothing looks for the smallest peak that any planner reaches, which takes seconds to minutes on a
small step, once for each step. The planners' tests check what it finds. All other tests need *a* minimum that holds.
This is about steps of up to 60 ops; on larger ones only two methods are asked, here as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remat.planners import registry

_QUICK = ("peak_greedy", "dtr", "keep_milp", "gap_lp")  # Without the walks of annealing.


def quickly() -> None:
    """For the rest of this process, only the quick methods are asked for a smallest peak."""
    registry._FOR_THE_SMALLEST_PEAK = _QUICK


def quickly_for_a_while() -> Iterator[None]:
    """The same until the iterator is exhausted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_FOR_THE_SMALLEST_PEAK", _QUICK)
        yield
