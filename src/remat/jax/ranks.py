"""Steps over the devices of several processes, which ``jax.distributed`` has brought together: one plan for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax

from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.ranks import Ranks, plan_of_all
from remat.fit.request import Request
from remat.jax._private import ProcessStore

_steps = itertools.count()
"""Steps over several processes that this process has planned: each of them plans the same ones, in the same order."""


def is_over_processes(shapes: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Do arguments lie on devices of several processes?"""
    shardings = [shape.sharding for shape in shapes if shape.sharding is not None]
    return any(len({device.process_index for device in one.device_set}) > 1 for one in shardings)


def planned_for_all(
    shapes: Sequence[jax.ShapeDtypeStruct], graph: Graph, request: Request, make: Callable[[], Plan]
) -> Plan:
    """The plan of the first process, where a step runs in several; else what ``make`` makes.

    Args:
        shapes: of the step's arguments, with their shardings.
        graph: the step as this process has traced it, as one device sees it.
        request: what the user of this process asked for.
        make: makes the plan.

    Raises:
        PlanMismatch: in every process, where two of them are about to run different steps.
        InfeasibleBudget: in every process, where no plan fits.
    """
    if not is_over_processes(shapes):
        return make()
    ranks = Ranks(jax.process_index(), jax.process_count(), ProcessStore())
    asked = {"budget": request.budget, "levers": "+".join(request.levers), "JAX": jax.__version__}
    return plan_of_all(ranks, f"remat/plan/{next(_steps)}", graph, asked, make)
