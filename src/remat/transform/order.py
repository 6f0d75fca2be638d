"""An order in which a step runs whose regions run slice by slice, each region in one place."""

from __future__ import annotations

from collections.abc import Sequence

from remat.transform.separable import Program, Region


def order_around(program: Program, regions: Sequence[Region]) -> tuple[int | Region, ...] | None:
    """The calls of a step in program order, each region where its last call stands, or before the first that reads it.

    Args:
        program: the step.
        regions: what runs in one place each; no two of them share a call.

    Returns:
        Numbers of calls and regions; None where regions wait for one another. Two can, though each of them waits for
        nothing that it makes itself: a call of the first reads what the second makes, and a call of the second what
        another call of the first makes.
    """
    region_of = {index: region for region in regions for index in region.ways}
    order: list[int | Region] = []
    done: set[int] = set()
    begun: set[int] = set()
    for start in range(len(program.calls)):
        if start in region_of and start < max(region_of[start].ways):
            continue  # Whoever reads of the region before asks for it.
        waiting = [start]
        while waiting:
            index = waiting[-1]
            calls = region_of[index].ways if index in region_of else {index: None}
            if index in done:
                waiting.pop()
                continue
            missing = {read for one in calls for read in program.earlier_calls[one]} - done - calls.keys()
            if not missing:
                order.append(region_of.get(index, index))
                done.update(calls)
            elif missing & begun:
                return None
            else:
                begun.update(calls)
                waiting.extend(sorted(missing))
    return tuple(order)
