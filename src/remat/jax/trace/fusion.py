"""What the compiler does to a program before anything runs, as far as memory depends on it.

It computes cheap values where they are read, and fuses chains of element-wise work into one kernel, whose inner values
never reach memory. A graph without that would hold many tensors that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remat.jax.trace import op_facts

if TYPE_CHECKING:
    from remat.jax.trace.program import Atom, Step

# Equations between two that are fused: farther apart, what the first one reads would live longer for it.
_NEAR = 12


def sunk(steps: Sequence[Step], avals: Sequence[Any], pinned: Sequence[int], outputs: Sequence[Atom]) -> list[Step]:
    """Program order, with cheap steps moved down to where they are first read.

    Differentiation writes what only the backward part reads (``3 * x**2``) into the forward part. A step moves where
    that keeps no more bytes alive: its inputs are read later anyway, or are no larger than what it makes.
    """
    count = len(steps)
    end = count + 1
    first_read = {value: end for step in steps for value in step.outputs}
    last_read = dict.fromkeys(pinned, end)
    place = [(number, 0) for number in range(count)]
    for atom in outputs:
        if isinstance(atom, int):
            first_read[atom] = last_read[atom] = end
    for number in reversed(range(count)):
        step = steps[number]
        at = number
        reads = dict.fromkeys(step.reads)
        if op_facts.may_sink(step.eqn) and step.outputs:
            target = min(first_read[value] for value in step.outputs)
            made = sum(op_facts.size_bytes(avals[value]) for value in step.outputs)
            extended = sum(op_facts.size_bytes(avals[v]) for v in reads if last_read.get(v, -1) < target)
            if at < target < end and extended <= made:
                at = target
                place[number] = (target, -1)
        for value in reads:
            first_read[value] = min(first_read.get(value, end), at)
            last_read[value] = max(last_read.get(value, -1), at)
    return [steps[number] for number in sorted(range(count), key=lambda number: (place[number], number))]


def fused(
    steps: Sequence[Step], avals: Sequence[Any], outputs: Sequence[Atom]
) -> list[tuple[tuple[Step, ...], tuple[int, ...], tuple[int, ...]]]:
    """Group steps into kernels; each group as (its steps, what it reads, what it makes), in a topological order.

    An element-wise step joins the kernel that alone reads it, unless that is far away and its inputs would have to live
    longer for it. Such a merge cannot close a cycle: all that the step makes goes into that kernel.
    """
    returned = {atom for atom in outputs if isinstance(atom, int)}
    readers: dict[int, set[int]] = {}
    last_read: dict[int, int] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
            last_read[value] = number
    root = list(range(len(steps)))
    for number in reversed(range(len(steps))):
        step = steps[number]
        if not op_facts.may_join(step.eqn) or any(value in returned for value in step.outputs):
            continue
        into = {root[reader] for value in step.outputs for reader in readers.get(value, ())}
        if len(into) != 1:
            continue
        (target,) = into
        if not op_facts.takes_producers(steps[target].eqn):
            continue
        extended = sum(op_facts.size_bytes(avals[v]) for v in dict.fromkeys(step.reads) if last_read[v] < target)
        made = sum(op_facts.size_bytes(avals[v]) for v in step.outputs)
        if target - number > _NEAR and extended > made:
            continue
        root[number] = target
        for value in step.reads:
            last_read[value] = max(last_read[value], target)
    groups: dict[int, list[Step]] = {}
    for number, step in enumerate(steps):
        groups.setdefault(root[number], []).append(step)
    result = []
    for target in sorted(groups):
        group = tuple(groups[target])
        inside = {value for step in group for value in step.outputs}
        reads = dict.fromkeys(value for step in group for value in step.reads if value not in inside)
        result.append((group, tuple(reads), steps[target].outputs))
    return result
