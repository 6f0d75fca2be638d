"""A second, naive replay of a schedule that names the rule that broke.

It follows the rules of :mod:`remat.core.schedule` as an allocator would, one run at a time with reference counts. On
purpose it shares no code with the simulator or a planner: where both agree, a mistake must have been made twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.core.errors import InvalidSchedule
from remat.core.graph import Graph, Op


def validate(graph: Graph, schedule: Sequence[int]) -> int:
    """Check that a schedule is legal, and return its peak in bytes.

    Args:
        graph: the training step.
        schedule: op indices, each op at least once.

    Returns:
        The peak in bytes of this function's own replay.

    Raises:
        InvalidSchedule: naming the broken rule (see ``remat.core.schedule.RULES``), the position and the op.

    Complexity: O(runs + reads), in plain Python.
    """
    _check_indices(graph, schedule)
    _check_repeats(graph, schedule)
    _check_order(graph, schedule)
    return _peak(graph, _bind(graph, schedule))


def _check_indices(graph: Graph, schedule: Sequence[int]) -> None:
    for position, op in enumerate(schedule):
        if not _is_index(op) or not 0 <= op < len(graph.ops):
            raise InvalidSchedule(
                "index out of range",
                f"position {position} is {op!r}, which is not the index of an op; the graph has {len(graph.ops)} ops",
            )


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_repeats(graph: Graph, schedule: Sequence[int]) -> None:
    runs = [0] * len(graph.ops)
    for op in schedule:
        runs[op] += 1
    for index, count in enumerate(runs):
        if count == 0:
            raise InvalidSchedule("missing op", f"{graph.describe_op(index)} never runs; every op runs at least once")
        if count > 1 and not graph.ops[index].recomputable:
            raise InvalidSchedule(
                "repeated op", f"{graph.describe_op(index)} runs {count} times, but it is not recomputable"
            )


def _check_order(graph: Graph, schedule: Sequence[int]) -> None:
    done: set[int] = set()
    for position, index in enumerate(schedule):
        if index in done:
            continue
        for before in graph.ops[index].after:
            if before not in done:
                raise InvalidSchedule(
                    "after",
                    f"position {position} runs {graph.describe_op(index)} before {graph.describe_op(before)}, which it "
                    "must come after",
                )
        if not graph.free_order and index != len(done):
            raise InvalidSchedule(
                "fixed order",
                f"position {position} runs {graph.describe_op(index)} for the first time before "
                f"{graph.describe_op(len(done))}, but this graph's first runs keep program order (free_order is false)",
            )
        done.add(index)


class _Storage:
    """One piece of memory, and how many runs still read it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.uses_left = 0


class _Run:
    """One run of an op, with what it touches: tensor id to storage."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.read: dict[int, _Storage] = {}
        self.made: dict[int, _Storage] = {}

    def storages_read(self) -> set[_Storage]:
        return set(self.read.values())


def _bind(graph: Graph, schedule: Sequence[int]) -> list[_Run]:
    newest: dict[int, _Storage] = {}
    pinned: dict[int, _Storage] = {}
    for tensor in graph.inputs:
        # Size 0: the pinned bytes are added once to every position, and freeing them must change nothing.
        newest[tensor] = pinned.setdefault(_root(graph, tensor), _Storage(0))
    runs = []
    for position, index in enumerate(schedule):
        run = _Run(graph.ops[index])
        for tensor in run.op.inputs:
            if tensor not in newest:
                raise InvalidSchedule(
                    "unmade input",
                    f"position {position} runs {graph.describe_op(index)}, which reads tensor {tensor} "
                    f"({graph.tensors[tensor].name!r}) before any op has made it",
                )
            run.read[tensor] = newest[tensor]
        for storage in run.storages_read():
            storage.uses_left += 1
        for tensor in run.op.outputs:
            if graph.tensors[tensor].alias_of is None:
                run.made[tensor] = newest[tensor] = _Storage(graph.tensors[tensor].size_bytes)
        for tensor in run.op.outputs:
            if graph.tensors[tensor].alias_of is not None:
                newest[tensor] = _storage_of_view(graph, run, tensor)
        runs.append(run)
    for tensor in set(graph.outputs):
        newest[tensor].uses_left += 1
    return runs


def _storage_of_view(graph: Graph, run: _Run, view: int) -> _Storage:
    root = _root(graph, view)
    if root in run.made:
        return run.made[root]
    base = graph.tensors[view].alias_of
    while base is not None and base not in run.read:
        base = graph.tensors[base].alias_of
    if base is not None:
        return run.read[base]
    return next(storage for tensor, storage in run.read.items() if _root(graph, tensor) == root)


def _root(graph: Graph, tensor: int) -> int:
    while (base := graph.tensors[tensor].alias_of) is not None:
        tensor = base
    return tensor


def _peak(graph: Graph, runs: list[_Run]) -> int:
    pinned_bytes = sum(graph.tensors[root].size_bytes for root in {_root(graph, tensor) for tensor in graph.inputs})
    pinned_roots = {_root(graph, tensor) for tensor in graph.inputs}
    live = peak = pinned_bytes
    for run in runs:
        live += sum(storage.size_bytes for storage in run.made.values())
        peak = max(peak, live + run.op.workspace_bytes - _taken_over(graph, run, pinned_roots))
        for storage in run.storages_read():
            storage.uses_left -= 1
            if storage.uses_left == 0:
                live -= storage.size_bytes
        live -= sum(storage.size_bytes for storage in run.made.values() if storage.uses_left == 0)
    return peak


def _taken_over(graph: Graph, run: _Run, pinned_roots: set[int]) -> int:
    """Bytes that this run saves by writing outputs into storage that it reads for the last time."""
    saved = 0
    lent: set[_Storage] = set()
    filled: set[int] = set()
    for source, target in run.op.in_place:
        storage = run.read[source]
        usable = storage.uses_left == 1 and _root(graph, source) not in pinned_roots and storage not in lent
        if usable and target in run.made and target not in filled:
            lent.add(storage)
            filled.add(target)
            saved += min(storage.size_bytes, run.made[target].size_bytes)
    return saved
