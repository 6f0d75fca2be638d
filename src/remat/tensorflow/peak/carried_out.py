"""Which runs of a schedule TensorFlow carries out: not those whose results nobody reads before the op runs again.

A schedule runs every op at least once, in program order the first time. What memory is too short to keep is dropped
right away then, and runs again where it is read. TensorFlow leaves out what nobody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat.core.schedule import Schedule
from remat.tensorflow import _private
from remat.tensorflow.trace.func_graph import TracedStep


def carried_out(step: TracedStep, schedule: Schedule) -> Schedule:
    """The schedule without the runs that are left out. In O(reads).

    Args:
        step: the traced function, before anything of it is rewritten.
        schedule: for its graph.
    """
    return tuple(schedule[position] for position in carried_out_at(step, schedule))


def carried_out_at(step: TracedStep, schedule: Schedule) -> Sequence[int]:
    """The positions in a schedule of the runs that are carried out; otherwise as ``carried_out``."""
    runs = Counter(schedule)
    if len(runs) == len(schedule):
        return range(len(schedule))
    graph = step.graph
    wanted = [False] * len(graph.tensors)
    for tensor in graph.outputs:
        wanted[tensor] = True
    kept: list[int] = []
    for position in reversed(range(len(schedule))):
        index = schedule[position]
        op = graph.ops[index]
        is_wanted = any(wanted[tensor] for tensor in op.outputs)
        if runs[index] > 1 and not is_wanted and is_read_as_the_graph_says(step, index):
            runs[index] -= 1
            continue
        for tensor in op.outputs:
            wanted[tensor] = False
        for tensor in op.inputs:
            wanted[tensor] = True
        kept.append(position)
    return kept[::-1]


def is_read_as_the_graph_says(step: TracedStep, index: int) -> bool:
    """Are the readers of an op those that its graph knows?

    Who reads a shape only reads nothing there, and goes on reading the first run.
    """
    operation = step.operations[index]
    if _private.is_awaited(operation):
        return False
    graph = step.graph
    known = {step.operations[reader].name for tensor in graph.ops[index].outputs for reader in graph.readers[tensor]}
    return all(reader.name in known for tensor in operation.outputs for reader in tensor.consumers())
