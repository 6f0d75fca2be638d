"""What a schedule means.

A schedule is a tuple of op indices, each op at least once. An op that occurs again is recomputed; dropping is
implied, since an instance of a tensor dies after its last read. Nothing else is a plan.

The memory model, which the simulator and the validator each implement on their own:

- A *storage instance* is born when a run of an op makes a root tensor, one that is no view. A run that makes a
  view binds the new instance of the view to the storage that the run itself makes or reads.
- A read binds to the newest instance of the tensor. A storage lives from its birth to the last read of any
  instance bound to it; what nobody reads still counts at the position that makes it.
- The newest instance of each output of the graph lives to the end of the schedule.
- The storages of the graph's inputs count always, and once; views of them add nothing.
- The bytes at a position are the pinned bytes, every storage alive (read, made, or kept for later) and the op's
  workspace.
- ``in_place`` pairs: where a run is the last use of the source's storage, and that storage is neither pinned nor
  kept to the end, the output takes it over and the run is charged the larger of the two only. A storage serves one
  output, an output takes one storage, and the first listed pair goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

from remat.core.graph import Graph, Op

Schedule: TypeAlias = tuple[int, ...]

RULES: Final[dict[str, str]] = {
    "index out of range": "every entry is the index of an op of the graph",
    "missing op": "every op runs at least once",
    "repeated op": "an op with recomputable=False runs exactly once",
    "unmade input": "a tensor that an op reads was made before, or is an input of the graph",
    "after": "before an op first runs, all ops named by its 'after' have run",
    "fixed order": "where free_order is False, first runs stand in program order",
}
"""The rules of a legal schedule: the ``rule`` of an ``InvalidSchedule`` is one of these names."""


def recomputed_ops(schedule: Sequence[int]) -> dict[int, int]:
    """For each op that runs more than once, its number of extra runs, by rising op index."""
    return {op: count - 1 for op, count in sorted(Counter(schedule).items()) if count > 1}


def keeps_program_order(schedule: Sequence[int]) -> bool:
    """Whether the first runs of the ops stand in program order."""
    first_runs = list(dict.fromkeys(schedule))
    return first_runs == sorted(first_runs)


def view_source(graph: Graph, op: Op, view: int) -> int:
    """The tensor whose storage a run of ``op`` gives to its output ``view``.

    That is the root, where the op makes it too; else the nearest base of the view that the op reads; else the first
    input of the op that shares the root. The storage of a base read matters, not the root's newest one: a view of an
    old view keeps the old storage alive even after the root was recomputed.
    """
    if graph.roots[view] in op.outputs:
        return graph.roots[view]
    base = graph.tensors[view].alias_of
    while base is not None:
        if base in op.inputs:
            return base
        base = graph.tensors[base].alias_of
    return next(tensor for tensor in op.inputs if graph.roots[tensor] == graph.roots[view])
