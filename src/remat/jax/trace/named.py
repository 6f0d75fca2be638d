"""A user's own checkpoints: what ``jax.ad_checkpoint.checkpoint_name`` named is kept, all else is recomputed."""

from __future__ import annotations

from collections.abc import Collection

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.jax.trace.program import Program, name_of
from remat.planning.checkpoints import plan_with_checkpoints

_SHOWN = 8


def plan_with_names(program: Program, graph: Graph, names: Collection[str]) -> Plan:
    """The plan that keeps the values of these names; its figures are those of the trace.

    Raises:
        UnsupportedStep: where a name is given to no value of the program.
    """
    named: dict[str, list[int]] = {}
    for step in (step for instruction in program.instructions for step in instruction.steps):
        if (given := name_of(step)) is not None:
            named.setdefault(given, []).append(step.outputs[0])
    for name in names:
        if name not in named:
            known = ", ".join(sorted(named)[:_SHOWN]) or "none"
            raise UnsupportedStep(
                f"the checkpoint {name!r} names no value that the gradients need (named there: {known}); name values "
                "on the way from the arguments to the loss with jax.ad_checkpoint.checkpoint_name, outside of loops"
            )
    return plan_with_checkpoints(graph, [value for name in names for value in named[name]])
