"""Nested recomputation over a chain of blocks, by dynamic programming over options for each block."""

from __future__ import annotations

from typing import Final

from remat.planners.chain.programme import BlockChain
from remat.planners.registry import strategy
from remat.planners.search import Search

_TRIES: Final = 5
_CAUTION: Final = 0.997
"""How often the programme is asked again for a corrected budget, and a little less than the correction says, since
bytes are rounded to levels of 1/400. Judgements; with fewer tries a schedule may miss the budget and be dropped."""


@strategy("block_chain")
def block_chain(search: Search) -> None:
    """For each block of the chain choose what it stores; recompute stretches of blocks from a checkpoint, nested.

    The optimal persistent schedule of a chain (Beaumont et al. 2019, arXiv:1911.13214) with several options for each
    block, as in Rockmate (Zhao et al. 2023, arXiv:2307.01236). Optimal within its model up to the rounding of bytes
    to 400 levels, for the options known. Complexity: O(blocks^2 (blocks + options) levels) numpy work, and one menu
    for each structure of block.
    """
    # What the model counts wrongly is made up for by planning again for a budget that differs by as much.
    budget_bytes, largest_bytes = search.budget_bytes, search.problem.plain.peak_bytes
    peaks: dict[tuple[int, ...], int] = {}
    for _ in range(_TRIES):
        chain = None if search.expired else BlockChain.of(search.problem)
        if chain is None or not chain.blocks:
            return
        schedule = chain.schedule(budget_bytes)
        if schedule is None:
            chain.squeeze()
            schedule = chain.schedule(budget_bytes)
        if schedule is None:
            return
        peak_bytes = peaks.get(schedule) or search.offer_improved(schedule)
        if schedule in peaks and peak_bytes <= search.budget_bytes:
            return
        peaks[schedule] = peak_bytes
        budget_bytes = min(largest_bytes, int(budget_bytes * search.budget_bytes / peak_bytes * _CAUTION))
