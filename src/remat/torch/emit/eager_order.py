"""A schedule -> the nearest schedule that eager PyTorch can run, and directions for the run time.

PyTorch runs the forward and the backward pass in its own order. A recomputation can start in one place only: where a
backward node reads what autograd had saved. So every recomputation of a schedule moves to the first such place after
it. Those inside of the forward pass are left out, since Python holds those tensors anyhow. A storage that is written
in place is always made again together with its writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.core.schedule import Schedule
from remat.torch.trace.recording import SavedTensor
from remat.torch.trace.trace import TracedStep


@dataclass(frozen=True)
class Rerun:
    """One recomputation in a backward pass.

    Attributes:
        op: the recorded op that makes the storages; in-place writes to them follow by themselves.
        keeps: those of its storages that are read later, with the number of the instance.
        uses: the storages, with the number of the instance, that it reads.
    """

    op: int
    keeps: dict[int, int]
    uses: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Directions:
    """What the run time does about each saved tensor. An instance is a storage and how often it was made again.

    A storage that is neither recomputed nor read by a recomputation does not occur here: autograd keeps it, as ever.

    Attributes:
        kept: storages whose first instance is kept.
        rerun: recorded ops that are recomputed.
        reruns: what is recomputed before an op of the backward pass.
        begins: by the number of a saved tensor: the op whose recomputations are due when that tensor is first read.
        instance: by the number of a saved tensor: the instance that is read; for those in ``begins`` and for all that
            read something recomputed.
        pending: for each instance, how many saved tensors in ``instance`` and how many recomputations read it.
    """

    kept: frozenset[int]
    rerun: frozenset[int]
    reruns: dict[int, tuple[Rerun, ...]]
    begins: dict[int, int]
    instance: dict[int, tuple[int, int]]
    pending: dict[tuple[int, int], int]


@dataclass(frozen=True)
class EagerOrder:
    """A schedule that eager PyTorch runs.

    Attributes:
        schedule: op indices of the graph.
        at: for each op of the backward pass, the recorded ops recomputed just before it.
    """

    schedule: Schedule
    at: dict[int, tuple[int, ...]]


class Units:
    """The ops that are recomputed together: one that makes storages, and those that then write to them.

    A unit is named by the recorded op that makes the storages.

    Attributes:
        members: for each unit, its ops in the graph.
    """

    def __init__(self, step: TracedStep) -> None:
        recording = step.recording
        self.members: dict[int, tuple[int, ...]] = {}
        self._of: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for index, op in enumerate(recording.ops[: recording.forward_ops]):
            if not op.makes:
                continue
            writes = {w for storage in op.makes for w in recording.storages[storage].writes}
            members = (index, *sorted(w for w in writes if w < recording.forward_ops))
            self.members[index] = tuple(step.graph_ops[m] for m in members)
            for member in self.members[index]:
                # An op that writes to storages of two units belongs to the later one; neither may run again alone.
                self._of[member] = index
            self._last[index] = self.members[index][-1]

    def started_by(self, op: int) -> int | None:
        """The unit of which a graph op is the first."""
        unit = self._of.get(op)
        return unit if unit is not None and self.members[unit][0] == op else None

    def ended_by(self, op: int) -> int | None:
        """The unit of which a graph op is the last."""
        unit = self._of.get(op)
        return unit if unit is not None and self._last[unit] == op else None


def in_eager_order(step: TracedStep, schedule: Sequence[int], units: Units) -> EagerOrder:
    """The nearest schedule that eager PyTorch can run."""
    reads_saved = {
        step.graph_ops[saved.unpacked]
        for saved in step.recording.saved
        if saved.unpacked is not None and _is_read(saved, step)
    }
    seen: set[int] = set()
    # Units whose recomputation the schedule has finished, and those that it is in the midst of; dicts keep the order.
    # Both run at the next op of the backward pass that reads a saved tensor.
    waiting: dict[int, None] = {}
    begun: dict[int, None] = {}
    at: dict[int, tuple[int, ...]] = {}
    for op in schedule:
        if op in seen:
            if (unit := units.started_by(op)) is not None:
                begun[unit] = None
            unit = units.ended_by(op)
            if unit is not None and unit in begun:
                del begun[unit]
                waiting.pop(unit, None)
                waiting[unit] = None
            continue
        seen.add(op)
        if op < step.forward_ops:
            waiting.clear()
            begun.clear()
        elif op in reads_saved:
            at[op] = (*waiting, *begun)
            waiting.clear()
            begun.clear()
    return _without_idle_runs(step, at, units)


def _is_read(saved: SavedTensor, step: TracedStep) -> bool:
    """Does the backward pass read this saved tensor?"""
    return saved.unpacked is not None and step.recording.forward_ops <= saved.unpacked < len(step.graph_ops)


def _without_idle_runs(step: TracedStep, at: dict[int, tuple[int, ...]], units: Units) -> EagerOrder:
    """The schedule, without recomputations whose results nobody reads before they are made again."""
    graph = step.graph
    order: list[int] = []
    wanted = set(graph.outputs)
    chosen: dict[int, tuple[int, ...]] = {}
    for op in range(len(graph.ops) - 1, step.forward_ops - 1, -1):
        order.append(op)
        wanted.update(graph.ops[op].inputs)
        runs: list[int] = []
        for unit in reversed(at.get(op, ())):
            members = units.members[unit]
            makes = {tensor for member in members for tensor in graph.ops[member].outputs}
            if not makes & wanted:
                continue
            wanted -= makes
            for member in members:
                wanted.update(t for t in graph.ops[member].inputs if t not in makes)
            order.extend(reversed(members))
            runs.append(unit)
        if runs:
            chosen[op] = tuple(reversed(runs))
    return EagerOrder((*range(step.forward_ops), *reversed(order)), chosen)


def directions_of(step: TracedStep, order: EagerOrder, units: Units) -> Directions:
    """What to keep, to recompute and to let go of, and when."""
    recording = step.recording
    recorded = _recorded_ops(step)
    number: Counter[int] = Counter()
    pending: Counter[tuple[int, int]] = Counter()
    reruns: dict[int, tuple[Rerun, ...]] = {}
    instance: dict[int, tuple[int, int]] = {}
    begins: dict[int, int] = {}
    saved_for: dict[int, list[tuple[int, int]]] = {}
    for place, saved in enumerate(recording.saved):
        if saved.storage is not None and saved.unpacked is not None and _is_read(saved, step):
            saved_for.setdefault(step.graph_ops[saved.unpacked], []).append((place, saved.storage))
    found: list[tuple[int, int, dict[int, int], tuple[tuple[int, int], ...]]] = []
    for op in range(step.forward_ops, len(step.graph.ops)):
        units_here = order.at.get(op, ())
        for unit in units_here:
            uses = tuple((storage, number[storage]) for storage in _reads_of(step, unit, units, recorded))
            pending.update(uses)
            number.update(recording.ops[unit].makes)
            found.append((op, unit, {storage: number[storage] for storage in recording.ops[unit].makes}, uses))
        reads = [(place, (storage, number[storage])) for place, storage in saved_for.get(op, [])]
        # Nothing tells which tensor the backward node reads first. One that was kept stays autograd's if another read
        # can begin the recomputations.
        chosen = [read for read in reads if read[1][1] > 0] or (reads if units_here else [])
        instance.update(chosen)
        pending.update(one for _, one in chosen)
        if units_here:
            begins.update((place, op) for place, _ in chosen)
    for op, unit, made, uses in found:
        keeps = {storage: count for storage, count in made.items() if pending[storage, count]}
        reruns[op] = (*reruns.get(op, ()), Rerun(unit, keeps, uses))
    kept = frozenset(storage for storage, count in pending if count == 0)
    return Directions(kept, frozenset(unit for _, unit, _, _ in found), reruns, begins, instance, dict(pending))


def gathered_early(step: TracedStep, order: EagerOrder, units: Units) -> list[tuple[int, int, int]]:
    """Parameters that ``fully_shard`` gathers in the backward pass, and that a recomputation needs before.

    Returns:
        For each: the op before which it is needed, the op that gathers it in the plain step, and its bytes. They are
        there in between though the graph does not say so.
    """
    recording = step.recording
    recorded = _recorded_ops(step)
    together: dict[int, list[int]] = {}
    for storage, number in recording.gathered_with.items():
        together.setdefault(number, []).append(storage)
    first: dict[int, int] = {}
    for op in sorted(order.at):
        for unit in order.at[op]:
            for member in units.members[unit]:
                for storage, _ in recording.ops[recorded[member]].reads:
                    if (again := recording.gathered_again.get(storage)) is not None:
                        # One that is needed brings all with it that are gathered at once.
                        first.setdefault(recording.gathered_with[again], op)
    found = []
    for number, op in first.items():
        for storage in together[number]:
            made_by = recording.storages[storage].made_by
            assert made_by is not None, "a parameter is gathered by an op"
            if op < step.graph_ops[made_by]:
                found.append((op, step.graph_ops[made_by], recording.storages[storage].size_bytes))
    return found


def _recorded_ops(step: TracedStep) -> dict[int, int]:
    """For each op of the graph, the recorded op that it stands for."""
    return {graph_op: index for index, graph_op in enumerate(step.graph_ops)}


def _reads_of(step: TracedStep, unit: int, units: Units, recorded: Mapping[int, int]) -> list[int]:
    """The storages of the step that a recomputation reads, other than what it makes itself."""
    recording = step.recording
    own = set(recording.ops[unit].makes)
    reads = [storage for member in units.members[unit] for storage, _ in recording.ops[recorded[member]].reads]
    made = [s for s in dict.fromkeys(reads) if s not in own and recording.storages[s].made_by is not None]
    return [s for s in made if not recording.storages[s].is_gathered]
