"""A traced TensorFlow function -> Graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from remat.core.graph import Graph, Op, Tensor
from remat.running.cost_model import DeviceProfile, op_time_s
from remat.tensorflow import _private
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.replicas import Replica
from remat.tensorflow.trace import calls, cpu_scratch, op_facts
from remat.tensorflow.trace.calls import CALLS, Call
from remat.tensorflow.trace.loop_memory import LoopMemory, loop_memory
from remat.tensorflow.trace.sizes import (
    HANDLES,
    LIST_OPERATIONS,
    LOOPS,
    Loop,
    Sizes,
    handle_bytes,
    shape_bytes,
    sizes_with_loops,
)
from remat.tensorflow.trace.which_run import in_places, in_topological_order, operations_that_run

_ANY_DEVICE = AllocatorModel(min_counted_bytes=0)


@dataclass(frozen=True)
class FunctionToPlan:
    """A function whose trace is about to end, with what its graph alone does not say.

    Attributes:
        func_graph: the function, or the part of a TensorFlow 1 graph that a session runs.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        in_xla: is it compiled with XLA?
        outputs: what it returns, where its trace has not ended yet; every operation then counts as needed.
        forward_ends: how many operations it had when its gradients were asked for; for checkpoints.
        carried: for a loop's body, names of the inputs that one iteration hands to the next.
        iterations: for a loop's body, how often it runs: what it appends to lists lives until the loop ends.
        moved: by name, operations that stand further in front in program order than where they were made: the number of
            the operation in whose place they stand.
        in_order: what its trace is changed by before it is planned: another order of its operations.
        replica: whose step it is, or holds beside others'; None where there is one device only.
    """

    func_graph: _private.FuncGraph
    input_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    in_xla: bool = False
    outputs: Sequence[tf.Tensor] | None = None
    forward_ends: int | None = None
    carried: Collection[str] = frozenset()
    iterations: int = 1
    moved: Mapping[str, int] = field(default_factory=dict)
    in_order: Callable[[TracedStep], TracedStep] | None = None
    replica: Replica | None = None

    @property
    def device(self) -> str | None:
        """The device whose part of the function is planned; None for all of it."""
        if self.replica is None or not self.replica.has_others_in(self.func_graph):
            return None
        return self.replica.device


def carried_inputs(body: _private.FuncGraph) -> frozenset[str]:
    """Names of what a loop hands from one iteration to the next: the inputs of its body that it does not capture."""
    captured = {inside.name for _, inside in body.captures}
    return frozenset(
        tensor.name for tensor in body.inputs if tensor.name not in captured and tensor.dtype not in HANDLES
    )


@dataclass(frozen=True)
class TracedStep:
    """A function's graph in remat's terms, and the way back to TensorFlow's.

    Attributes:
        graph: what planners see.
        operations: for each op of ``graph``, TensorFlow's operation.
        tensors: for each tensor of ``graph``, TensorFlow's tensor.
    """

    graph: Graph
    operations: tuple[tf.Operation, ...]
    tensors: tuple[tf.Tensor, ...]

    def moved(self, tensor_named: Callable[[str], tf.Tensor]) -> TracedStep:
        """The same step in a copy of its function, whose tensors are found by name."""
        tensors = tuple(tensor_named(t.name) for t in self.tensors)
        graph = tensors[0].graph
        operations = tuple(
            tensor_named(op.outputs[0].name).op if op.outputs else graph.get_operation_by_name(op.name)
            for op in self.operations
        )
        return TracedStep(self.graph, operations, tensors)

    def in_order(self, order: Sequence[int]) -> TracedStep:
        """The same step with its operations in another order, as ``Graph.in_order`` has it."""
        operations = tuple(self.operations[op] for op in order)
        return TracedStep(self.graph.in_order(order), operations, self.tensors)


def trace_func_graph(
    func_graph: _private.FuncGraph,
    *,
    profile: DeviceProfile,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    allocator: AllocatorModel = _ANY_DEVICE,
    outputs: Sequence[tf.Tensor] | None = None,
    carried: Collection[str] = (),
    bodies: Mapping[tf.Operation, _private.FuncGraph] | None = None,
    moved: Mapping[str, int] | None = None,
    is_final: bool = False,
) -> TracedStep:
    """The joint graph of a function that has been traced, or whose trace is about to end.

    Args:
        func_graph: the function; its outputs and stateful operations say what will run.
        profile: device figures for the predicted times.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        allocator: how the device uses memory; it says whether kernels convert half precision.
        outputs: what the function returns, where its trace has not ended yet; every operation then counts as needed.
        carried: names of inputs of a loop's body that no caller keeps: their blocks may be freed, or written into.
        bodies: those that loops of the function would get, where they are not to keep their own.
        moved: by name, the places in program order of operations that were made later than they run.
        is_final: will nobody differentiate the function? Then ``IdentityN`` operations that TensorFlow put in for the
            sake of their own gradient, as where replicas exchange gradients, tie nothing together.

    Raises:
        UnsupportedStep: where an input's shape is unknown.
    """
    sizes = sizes_with_loops(func_graph, input_shapes or {})
    return _Tracer(
        func_graph, sizes, profile, allocator, outputs, carried, bodies=bodies, moved=moved, is_final=is_final
    ).run()


def trace_body(loop: Loop, profile: DeviceProfile, allocator: AllocatorModel = _ANY_DEVICE) -> TracedStep:
    """The graph of a loop's body, in which what one iteration hands to the next is made by ops."""
    return _Tracer(loop.body, loop.sizes, profile, allocator, None, loop.carried, loop.items_read()).run()


class _Tracer:
    def __init__(
        self,
        func_graph: _private.FuncGraph,
        sizes: Sizes,
        profile: DeviceProfile,
        allocator: AllocatorModel,
        outputs: Sequence[tf.Tensor] | None,
        carried: Collection[str] = (),
        items_read: Mapping[str, int] | None = None,
        bodies: Mapping[tf.Operation, _private.FuncGraph] | None = None,
        moved: Mapping[str, int] | None = None,
        is_final: bool = False,
    ) -> None:
        self.is_final = is_final
        self.bodies = bodies or {}
        self.moved = moved or {}
        self.func_graph = func_graph
        self.items_read = items_read or {}  # In a loop's body: bytes of what is read from its lists, by name.
        self.carried = carried
        self.sizes = sizes
        self.profile = profile
        self.allocator = allocator
        # A function's output must stay the tensor that the caller was handed.
        self.outputs = list(func_graph.outputs if outputs is None else outputs)
        self.output_names = frozenset(t.name for t in self.outputs)
        self.trace_has_ended = outputs is None
        self.ids: dict[str, int] = {}
        self.tensors: list[Tensor] = []
        self.handles: list[tf.Tensor] = []
        self.pinned: list[int] = []
        self.ops: list[Op] = []
        self.operations: list[tf.Operation] = []
        self.numbers: dict[tf.Operation, int] = {}
        self.loops: dict[tf.Operation, Loop] = {}
        self.memory: dict[tf.Operation, LoopMemory] = {}
        self.bodies_called: dict[tf.Operation, tuple[Call, Graph]] = {}
        self.unknown: list[str] = []  # What could not be told of the step, for people.
        self.most_elements: dict[str, int] = {}  # of tensors whose shape depends on values
        self.unsized: dict[str, tf.Tensor] = {}

    def run(self) -> TracedStep:
        all_operations = in_places(self.func_graph.get_operations(), self.moved)
        if self.trace_has_ended:
            needed = operations_that_run(self.func_graph, self.moved)
        else:
            needed = in_topological_order(all_operations)
        for op in needed:
            if op.type in op_facts.RESIDENT and not any(t.name in self.carried for t in op.outputs):
                self._add_resident(op)
            elif self._is_bypassed(op):
                for source, output in zip(op.inputs, op.outputs, strict=True):
                    self.ids[output.name] = self.ids[source.name]
            else:
                self._add_op(op)
        self._warn_of_unsized()
        outputs = tuple(dict.fromkeys(self.ids[t.name] for t in self.outputs if t.name in self.ids))
        assumed = (loop.assumed for loop in self.loops.values() if loop.known_iterations is None)
        notes = (*assumed, *self.unknown)
        graph = Graph(tuple(self.ops), tuple(self.tensors), tuple(self.pinned), outputs, False, notes)
        return TracedStep(graph, tuple(self.operations), tuple(self.handles))

    def _is_bypassed(self, op: tf.Operation) -> bool:
        # The graph optimizer takes an IdentityN over all gradients apart and forgets the order that went through it,
        # so its readers are made to read its inputs.
        if op.type not in op_facts.VIEW_LISTS or op.control_inputs:
            return False
        if _private.is_custom_gradient(op) and not (self.is_final and _private.is_gate_of_tensorflow(op)):
            return False
        return not any(t.name in self.output_names for t in op.outputs)

    def _add(self, handle: tf.Tensor, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        self.handles.append(handle)
        self.ids[handle.name] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _add_resident(self, op: tf.Operation) -> None:
        for output in op.outputs:
            size = handle_bytes(output) if output.dtype == tf.resource else self.sizes.bytes(output) or 0
            self.pinned.append(
                self._add(output, Tensor(size, output.name, self.sizes.shape(output), output.dtype.name))
            )

    def _add_op(self, op: tf.Operation) -> None:
        index = len(self.ops)
        reads = () if op.type in op_facts.METADATA else tuple(self.ids[t.name] for t in op.inputs)
        outputs = tuple(self._add(t, self._describe(op, number, t)) for number, t in enumerate(op.outputs))
        after = {self.numbers[c] for c in op.control_inputs if c in self.numbers}
        if op.type in op_facts.METADATA:
            after |= {self.numbers[t.op] for t in op.inputs if t.op in self.numbers}
        makes_output = any(t.name in self.output_names for t in op.outputs)
        self.ops.append(
            Op(
                name=op.name,
                kind=op.type,
                inputs=reads,
                outputs=outputs,
                time_s=self._time_s(op, outputs),
                recomputable=not makes_output and op.type not in op_facts.RESIDENT and op_facts.may_repeat(op),
                workspace_bytes=self._workspace_bytes(op),
                after=tuple(sorted(after)),
                in_place=self._in_place(op, outputs),
            )
        )
        self.operations.append(op)
        self.numbers[op] = index

    def _loop(self, op: tf.Operation) -> Loop:
        if op not in self.loops:
            self.loops[op] = Loop(op, self.sizes, self.bodies)
        return self.loops[op]

    def _memory(self, op: tf.Operation) -> LoopMemory:
        if op not in self.memory:
            loop = self._loop(op)
            tracer = _Tracer(loop.body, loop.sizes, self.profile, self.allocator, None, loop.carried, loop.items_read())
            self.memory[op] = loop_memory(loop, tracer.run().graph, tracer.ids)
        return self.memory[op]

    def _called(self, op: tf.Operation) -> tuple[Call, Graph]:
        """A call of a function, and the graph of that function."""
        if op not in self.bodies_called:
            call = Call(op, self.sizes)
            # XLA brings kernels of its own.
            allocator = replace(self.allocator, own_kernels="none") if call.in_xla else self.allocator
            tracer = _Tracer(call.body, call.sizes, self.profile, allocator, None)
            self.bodies_called[op] = call, tracer.run().graph
        return self.bodies_called[op]

    def _bytes_of_call(self, op: tf.Operation) -> int:
        call, body = self._called(op)
        if not call.in_xla or not self.allocator.compiles_calls:
            return calls.scratch_bytes(body)
        compiled_bytes = call.compiled_bytes()
        if compiled_bytes is None:
            self.unknown.append(call.unknown)
        return compiled_bytes or 0

    def _workspace_bytes(self, op: tf.Operation) -> int:
        """What a kernel needs besides its inputs and outputs; for a loop or a call what its operations do."""
        if op.type in LOOPS:
            return self._memory(op).workspace_bytes
        if op.type in CALLS:
            return self._bytes_of_call(op)
        if self.allocator.runs_own_kernel(op):
            shapes = [[self.sizes.shape(t) for t in tensors] for tensors in (op.inputs, op.outputs)]
            return cpu_scratch.scratch_bytes(op, *shapes)
        if not self.allocator.converts_half:
            return 0
        converted = op_facts.converted_from_half(op, [self.sizes.shape(t) for t in (*op.inputs, *op.outputs)])
        return sum(shape_bytes(shape, tf.float32) for shape in converted)

    def _list(self, op: tf.Operation, number: int, output: tf.Tensor) -> Tensor:
        """A list of tensors behind a handle: the loop that fills it says how large it gets."""
        if op.type == "TensorListFromTensor":
            shape = self.sizes.shape(op.inputs[0]) or (0,)
            items = shape[0] * shape_bytes(shape[1:], op.inputs[0].dtype)
            return Tensor(items, output.name, shape[:1], "variant")
        if op.type == "ZerosLike":
            copied = self.tensors[self.ids[op.inputs[0].name]]
            while copied.alias_of is not None:
                copied = self.tensors[copied.alias_of]
            return Tensor(copied.size_bytes, output.name, copied.shape, "variant")
        if op.type in op_facts.VIEWS:
            return Tensor(0, output.name, dtype="variant", alias_of=self.ids[op.inputs[0].name])
        if op.type in LOOPS:
            loop = self._loop(op)
            source = loop.list_source(number)
            grown = loop.grown_bytes(number)
            if source is not None and not grown:
                return Tensor(0, output.name, dtype="variant", alias_of=self.ids[op.inputs[source].name])
            return Tensor(grown, output.name, (loop.items_added(number),) if grown else None, "variant")
        return Tensor(0, output.name, dtype=output.dtype.name)

    def _describe(self, op: tf.Operation, number: int, output: tf.Tensor) -> Tensor:
        if output.dtype == tf.variant:
            return self._list(op, number, output)
        alias_of = None
        if number == 0 and self._is_view(op):
            alias_of = self.ids[op.inputs[0].name]
        elif op.type in op_facts.VIEW_LISTS or (op.type in LOOPS and self._loop(op).hands_through(number)):
            alias_of = self.ids[op.inputs[number].name]
        size = self.items_read[output.name] if output.name in self.items_read else self.sizes.bytes(output)
        if size is None:
            size = self._bytes_at_most(op, output)
        return Tensor(size, output.name, self.sizes.shape(output), output.dtype.name, alias_of)

    def _bytes_at_most(self, op: tf.Operation, output: tf.Tensor) -> int:
        """For a shape that depends on values: ops that make one (Where, Unique, a mask) pick from what they read."""
        counts = [self._elements_at_most(t) for t in op.inputs if t.dtype != tf.resource]
        self.most_elements[output.name] = max((n for n in counts if n is not None), default=0)
        if not counts or None in counts:
            self.unsized[output.name] = output
        return shape_bytes((self.most_elements[output.name],), output.dtype)

    def _elements_at_most(self, tensor: tf.Tensor) -> int | None:
        shape = self.sizes.shape(tensor)
        if shape is not None and tensor.dtype != tf.variant:
            return math.prod(shape)
        return None if tensor.name in self.unsized else self.most_elements.get(tensor.name)

    def _warn_of_unsized(self) -> None:
        if self.unsized:
            first = next(iter(self.unsized.values()))
            warnings.warn(
                f"the sizes of {len(self.unsized)} tensors are not known while the function is traced, the first "
                f"{first.name!r} of a {first.op.type}; they are counted too small, so the budget may be exceeded. Give "
                "the tensors that they are made from a fixed shape (tf.ensure_shape)",
                stacklevel=2,
            )

    def _is_view(self, op: tf.Operation) -> bool:
        if not op.inputs or not op.outputs:
            return False
        return op_facts.is_view(op, self.sizes.shape(op.inputs[0]), self.sizes.shape(op.outputs[0]))

    def _in_place(self, op: tf.Operation, outputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        if not outputs:
            return ()
        if op.type in LOOPS:
            return tuple((self.ids[op.inputs[n].name], outputs[m]) for n, m in self._memory(op).takes_over)
        inputs, number_of_output = op_facts.in_place(op)
        target = outputs[number_of_output]
        pairs = []
        for number in inputs:
            source = self.ids[op.inputs[number].name]
            if self.tensors[source].size_bytes == self.tensors[target].size_bytes > 0:
                pairs.append((source, target))
        return tuple(dict.fromkeys(pairs))

    def _time_s(self, op: tf.Operation, outputs: tuple[int, ...]) -> float:
        if (
            self._is_view(op)
            or op.type in op_facts.VIEW_LISTS
            or op.type in op_facts.METADATA
            or op.type in op_facts.RESIDENT
            or op.type in LIST_OPERATIONS
            or not op.outputs
        ):
            return 0.0
        if op.type in LOOPS:
            return self._loop(op).iterations() * self._memory(op).time_s
        if op.type in CALLS:
            return self._called(op)[1].time_s
        count = op_facts.flops_on_cpu if self.profile.is_cpu else op_facts.flops
        work = count(op, [self.sizes.shape(t) for t in op.inputs], [self.sizes.shape(t) for t in op.outputs])
        moved = sum(self.tensors[self.ids[t.name]].size_bytes for t in op.inputs)
        moved += sum(self.tensors[number].size_bytes for number in outputs)
        return op_time_s(self.profile, work, moved, op.outputs[0].dtype.name)
