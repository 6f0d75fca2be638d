"""The joint graph of a training step: tensors with sizes, operations with times.

The graph holds numbers only, never an array, so that one planner serves every framework. Its file format is
``remat.graph`` version 1: JSON, plain or gzipped. Keys that hold their default are left out; unknown keys are ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from remat.core.errors import InvalidGraph
from remat.core.files import JsonReader, read_json, write_json

GRAPH_FORMAT: Final = "remat.graph"
GRAPH_VERSION: Final = 1
"""The newest version of the format, which is also the only one so far."""

# 8 PiB in all: far above any device, and low enough that sums stay exact in 64 bits however often ops run.
_MOST_BYTES: Final = 2**53

ROLES: Final = ("parameter", "optimizer_state", "batch", "state")
"""What an input of a step is: a weight, a slot of the optimizer, data, or whatever else is kept (seeds, metrics)."""

PHASES: Final = ("forward", "backward", "update")
"""Where in the step an op runs; the update is what uses the gradients of the parameters."""


@dataclass(frozen=True)
class Tensor:
    """One value that an operation makes, or an input of the step.

    Attributes:
        size_bytes: storage in bytes. A view may state its own size; it adds nothing.
        name: for people; need not be unique.
        shape: dimensions, or None where unknown.
        dtype: the framework's short name ("float32"), or None.
        alias_of: id of the tensor whose storage this one shares, or None.
        role: of an input of the step, for people: one of ``ROLES``, or "" where unknown.
    """

    size_bytes: int
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    alias_of: int | None = None
    role: str = ""


@dataclass(frozen=True)
class Op:
    """One operation of the step.

    Attributes:
        name: for people, usually with the layer's path.
        kind: the framework's type of operation ("MatMul").
        inputs: ids of the tensors read. A tensor read twice may stand twice.
        outputs: ids of the tensors made.
        time_s: predicted duration in seconds.
        recomputable: False for whatever must run exactly once (random draws, state writes).
        workspace_bytes: scratch memory while the op runs.
        after: indices of ops that must have run before this op first runs, though no tensor ties them.
        in_place: pairs (input id, output id): the output takes over the input's storage whenever this
            op is the last reader of that storage, as frameworks do for element-wise kernels.
        phase: of the step, for people: one of ``PHASES``, or "" where unknown.
        layer: the path of the layer that it belongs to, "" where unknown.
        source: the line that made it, "model.py:12 in call", "" where unknown.
    """

    name: str = ""
    kind: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    time_s: float = 0.0
    recomputable: bool = True
    workspace_bytes: int = 0
    after: tuple[int, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
    phase: str = ""
    layer: str = ""
    source: str = ""


@dataclass(frozen=True)
class Graph:
    """A training step as operations in program order, which is a topological order.

    Attributes:
        ops: the operations; a schedule refers to them by index.
        tensors: the tensors; ops refer to them by index.
        inputs: ids of pinned tensors, resident for the whole step (parameters, optimizer slots, batch).
        outputs: ids of tensors that live to the end of the step.
        free_order: may a plan move first computations, within the dependencies?
        notes: for people: what the trace had to assume, a sentence each.
        turning_point: the op that ends the forward part, where the front end knows it; None leaves it to planners.

    Raises:
        InvalidGraph: where a structural rule is broken; the message names the op or tensor.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    free_order: bool = True
    notes: tuple[str, ...] = ()
    turning_point: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """For each tensor, the index of the op that makes it; None for a pinned input."""
        made: list[int | None] = [None] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                made[tensor] = index
        return tuple(made)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the indices of the ops that read it, rising, each once."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            for tensor in dict.fromkeys(op.inputs):
                found[tensor].append(index)
        return tuple(tuple(ops) for ops in found)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """For each tensor, the tensor that owns its storage; itself unless it is a view."""
        root = list(range(len(self.tensors)))
        for start in range(len(self.tensors)):
            tensor = start
            while (base := self.tensors[tensor].alias_of) is not None:
                tensor = base
            root[start] = tensor
        return tuple(root)

    @cached_property
    def pinned_bytes(self) -> int:
        """Bytes of the storages of the step's inputs, which are resident all the time."""
        return sum(self.tensors[root].size_bytes for root in {self.roots[t] for t in self.inputs})

    @cached_property
    def time_s(self) -> float:
        """Predicted seconds of the plain step: every op once."""
        # Exact summation, as in the simulator: another order of the same ops takes exactly as long.
        return math.fsum(op.time_s for op in self.ops)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that a schedule depends on: not what is for people, nor the turning point.

        Nor which of two inputs a kernel takes over where it may take either: names may decide that.
        """
        parts = {
            "tensors": [(t.size_bytes, t.alias_of) for t in self.tensors],
            "ops": [
                (
                    op.inputs,
                    op.outputs,
                    op.recomputable,
                    op.workspace_bytes,
                    op.after,
                    sorted(op.in_place, key=lambda pair: op.inputs.index(pair[0])),
                )
                for op in self.ops
            ],
            "inputs": self.inputs,
            "outputs": self.outputs,
            "free_order": self.free_order,
        }
        text = json.dumps(parts, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def plain_schedule(self) -> tuple[int, ...]:
        """Every op once, in program order."""
        return tuple(range(len(self.ops)))

    def in_order(self, order: Sequence[int]) -> Graph:
        """The same step with its program in another order.

        Args:
            order: the ops, each once, each behind all whose tensors it reads and all that its ``after`` names.

        Raises:
            InvalidGraph: for an order that is none.
        """
        if sorted(order) != list(range(len(self.ops))):
            raise InvalidGraph(f"an order of {len(self.ops)} ops names each of them once; this one has {len(order)}")
        place = {op: number for number, op in enumerate(order)}
        ops = tuple(
            replace(self.ops[op], after=tuple(sorted(map(place.__getitem__, self.ops[op].after)))) for op in order
        )
        turn = None if self.turning_point is None else place[self.turning_point]
        return replace(self, ops=ops, turning_point=turn)

    def describe_op(self, index: int) -> str:
        """The op's index, kind and name in one phrase for messages."""
        op = self.ops[index]
        return f"op {index} ({op.kind or 'op'} {op.name!r})"

    def save(self, path: str | Path) -> None:
        """Write the graph as ``remat.graph`` JSON; a path ending in ``.gz`` is compressed."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The graph as a JSON-ready dictionary in the ``remat.graph`` format."""
        return {
            "format": GRAPH_FORMAT,
            "version": GRAPH_VERSION,
            "tensors": [_without_defaults(tensor, required=("size_bytes",)) for tensor in self.tensors],
            "ops": [_without_defaults(op, required=("name", "kind", "inputs", "outputs", "time_s")) for op in self.ops],
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "free_order": self.free_order,
            **({"notes": list(self.notes)} if self.notes else {}),
            **({} if self.turning_point is None else {"turning_point": self.turning_point}),
        }


def load_graph(path: str | Path) -> Graph:
    """Read a graph from ``.json`` or ``.json.gz``.

    Raises:
        InvalidFile: if the file is no ``remat.graph``, is truncated, or was written by a newer version.
        InvalidGraph: if the graph in it breaks a structural rule.
        FileNotFoundError: if there is no such file.
    """
    return graph_from(JsonReader(str(path), read_json(path)))


def graph_from_json(data: object) -> Graph:
    """The graph in a decoded JSON value of the ``remat.graph`` format.

    Raises:
        InvalidFile: if the value is something else.
        InvalidGraph: if the graph breaks a structural rule.
    """
    return graph_from(JsonReader("graph JSON", data))


def graph_from(reader: JsonReader) -> Graph:
    """The graph in a JSON object of the ``remat.graph`` format; errors as :func:`graph_from_json`."""
    reader.check_format(GRAPH_FORMAT, GRAPH_VERSION)
    tensors = tuple(_tensor_from(item) for item in reader.objects("tensors", "tensor"))
    ops = tuple(_op_from(item) for item in reader.objects("ops", "op"))
    inputs, outputs = reader.integers("inputs"), reader.integers("outputs")
    free_order = reader.flag("free_order", True)
    notes = reader.texts("notes")
    turning_point = reader.integer("turning_point") if reader.has("turning_point") else None
    try:
        return Graph(ops, tensors, inputs, outputs, free_order, notes, turning_point)
    except InvalidGraph as error:
        raise InvalidGraph(f"{reader.source}: {error}") from None


def _tensor_from(reader: JsonReader) -> Tensor:
    return Tensor(
        size_bytes=reader.integer("size_bytes"),
        name=reader.text("name", ""),
        shape=reader.integers("shape") if reader.has("shape") else None,
        dtype=reader.text("dtype") if reader.has("dtype") else None,
        alias_of=reader.integer("alias_of") if reader.has("alias_of") else None,
        role=reader.text("role", ""),
    )


def _op_from(reader: JsonReader) -> Op:
    return Op(
        name=reader.text("name", ""),
        kind=reader.text("kind", ""),
        inputs=reader.integers("inputs"),
        outputs=reader.integers("outputs"),
        time_s=reader.number("time_s"),
        recomputable=reader.flag("recomputable", True),
        workspace_bytes=reader.integer("workspace_bytes", 0),
        after=reader.integers("after", []),
        in_place=reader.pairs("in_place"),
        phase=reader.text("phase", ""),
        layer=reader.text("layer", ""),
        source=reader.text("source", ""),
    )


def _without_defaults(item: Tensor | Op, required: tuple[str, ...]) -> dict[str, Any]:
    values = ((field.name, getattr(item, field.name), field.default) for field in fields(item))
    return {name: _as_lists(value) for name, value, default in values if name in required or value != default}


def _as_lists(value: Any) -> Any:
    """Tuples become lists, which is all that JSON has, so that what is written equals what is read back."""
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _check(graph: Graph) -> None:
    count = len(graph.tensors)
    for number, tensor in enumerate(graph.tensors):
        _check_size(tensor.size_bytes, f"size_bytes of tensor {number} ({tensor.name!r})")
        _check_ids((tensor.alias_of,) if tensor.alias_of is not None else (), count, f"alias_of of tensor {number}")
    _check_ids(graph.inputs, count, "the graph's inputs")
    _check_ids(graph.outputs, count, "the graph's outputs")
    turn = graph.turning_point
    if turn is not None and not (_is_int(turn) and 0 <= turn < len(graph.ops)):
        raise InvalidGraph(f"turning_point names op {turn!r}, but there are {len(graph.ops)} ops")
    _check_alias_cycles(graph)

    pinned = set(graph.inputs)
    made: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        where = graph.describe_op(index)
        _check_ids(op.inputs, count, f"the inputs of {where}")
        _check_ids(op.outputs, count, f"the outputs of {where}")
        _check_size(op.workspace_bytes, f"workspace_bytes of {where}")
        if not op.time_s >= 0 or op.time_s == float("inf"):
            raise InvalidGraph(f"{where} has time_s {op.time_s}; it is a finite number of seconds, 0 or more")
        for before in op.after:
            if not _is_int(before) or not 0 <= before < len(graph.ops):
                raise InvalidGraph(f"'after' of {where} names op {before}, but there are {len(graph.ops)} ops")
        for tensor_id in op.outputs:
            if tensor_id in pinned:
                raise InvalidGraph(f"{where} makes tensor {tensor_id}, which is an input of the graph")
            if tensor_id in made:
                raise InvalidGraph(f"{where} makes tensor {tensor_id}, which op {made[tensor_id]} makes already")
            made[tensor_id] = index
        for source, target in op.in_place:
            if source not in op.inputs or target not in op.outputs:
                raise InvalidGraph(f"in_place of {where} pairs ({source}, {target}), not an input and an output of it")
    total_bytes = sum(t.size_bytes for t in graph.tensors) + sum(op.workspace_bytes for op in graph.ops)
    if total_bytes > _MOST_BYTES:
        raise InvalidGraph(f"all sizes together are {total_bytes} bytes, above the {_MOST_BYTES} that remat counts to")
    for tensor_id in graph.inputs:
        if (root := graph.roots[tensor_id]) in made:
            raise InvalidGraph(
                f"tensor {tensor_id} is an input of the graph, but a view of tensor {root}, which op {made[root]} makes"
            )
    for tensor_id in graph.outputs:
        if tensor_id not in made and tensor_id not in pinned:
            raise InvalidGraph(f"tensor {tensor_id} is an output of the graph, but no op makes it")
    _check_order(graph, made, pinned)


def _check_size(size_bytes: int, where: str) -> None:
    if not _is_int(size_bytes):
        raise InvalidGraph(f"{where} is {size_bytes!r}, not a Python int; a size counts bytes and is 0 or more")
    if size_bytes < 0:
        raise InvalidGraph(f"{where} is {size_bytes}, a negative size; a size counts bytes and is 0 or more")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_ids(ids: tuple[int, ...], count: int, where: str) -> None:
    for number in ids:
        if not _is_int(number) or not 0 <= number < count:
            raise InvalidGraph(
                f"{where}: id {number!r} is out of range, the graph has {count} tensors and ids start at 0"
            )


def _check_alias_cycles(graph: Graph) -> None:
    for start in range(len(graph.tensors)):
        seen = {start}
        base = graph.tensors[start].alias_of
        while base is not None:
            if base in seen:
                raise InvalidGraph(f"tensor {start} is a view of itself: its alias_of leads back to tensor {base}")
            seen.add(base)
            base = graph.tensors[base].alias_of


def _check_order(graph: Graph, made: Mapping[int, int], pinned: set[int]) -> None:
    """Program order must be a topological order; anything else is a cycle or a wrong order."""
    for index, op in enumerate(graph.ops):
        where = graph.describe_op(index)
        for tensor_id in op.inputs:
            if tensor_id in pinned:
                continue
            if tensor_id not in made:
                raise InvalidGraph(f"{where} reads tensor {tensor_id}, which no op makes and which is no graph input")
            if made[tensor_id] >= index:
                raise InvalidGraph(
                    f"{where} reads tensor {tensor_id}, which {graph.describe_op(made[tensor_id])} makes later or "
                    "itself: the graph has a cycle, or its ops are not in topological order"
                )
        for before in op.after:
            if before >= index:
                raise InvalidGraph(
                    f"{where} must come after {graph.describe_op(before)}, which stands later: the graph has a cycle, "
                    "or its ops are not in topological order"
                )
        family = {graph.roots[t] for t in op.inputs} | {t for t in op.outputs if graph.tensors[t].alias_of is None}
        for tensor_id in op.outputs:
            if graph.tensors[tensor_id].alias_of is not None and graph.roots[tensor_id] not in family:
                raise InvalidGraph(
                    f"{where} makes tensor {tensor_id}, a view of tensor {graph.roots[tensor_id]}, without reading it "
                    "or another view of it; add it to the op's inputs"
                )
