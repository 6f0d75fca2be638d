"""Store everything: the plain schedule, the baseline of every comparison."""

from __future__ import annotations

from remat.planners.registry import strategy
from remat.planners.search import Search


@strategy("store_all", has_fallbacks=True)
def store_all(search: Search) -> None:
    """Every op once, in program order, whatever the budget. Optimal wherever it fits; O(ops)."""
