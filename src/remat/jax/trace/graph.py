"""A traced function as a Graph: bytes, seconds, what may repeat, and the labels that reports show."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from remat.core.graph import Graph, Op, Tensor
from remat.core.labels import OpLabel, labelled, shown_path
from remat.core.simulator import simulate
from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr, JaxprEqn
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Instruction, Program, program_of, trace_jaxpr
from remat.planners.view.problem import Problem
from remat.running.cost_model import DeviceProfile, get_profile, op_time_s

_TRANSFORMED: Final = re.compile(r"(?:transpose|jvp|vmap|checkpoint|rematted_computation|pjit|jit)\(([^()]*)\)")
"""What JAX's transformations put around the names of scopes: "transpose(jvp(Encoder))/Dense_0".

The names are those of JAX 0.10; a transformation that is missing here stays in the layer's name, and nothing else.
"""


def trace(fn: Callable[..., Any], *args: Any, device: str = "cpu", **kwargs: Any) -> Graph:
    """The joint graph of a training step, without running it.

    Args:
        fn: a function that ``jax.jit`` could compile, its gradients included: ``jax.value_and_grad(loss)`` or a whole
            step with the optimizer's update.
        *args: pytrees of arrays or ``jax.ShapeDtypeStruct``.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        **kwargs: further arguments of ``fn``.

    Returns:
        The graph, its order fixed; sizes in bytes, times in seconds. Arguments and captured arrays are its inputs.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    closed, _ = trace_jaxpr(lambda *a: fn(*a, **kwargs), args)
    program = program_of(closed)
    return label_graph(graph_of_program(program, get_profile(device)), program)


def graph_of_program(program: Program, profile: DeviceProfile) -> Graph:
    """The graph of a flattened function: tensor ids are value ids, op indices are instruction numbers."""
    return _with_turning_point(_graph_without_parts(program, profile), program)


def _graph_without_parts(program: Program, profile: DeviceProfile) -> Graph:
    """The same, but nothing says where its forward part ends, which takes a third of the time to find."""
    avals = program.avals
    tensors = [Tensor(op_facts.size_bytes(aval), "", *_shape_and_dtype(aval)) for aval in avals]
    made = {value for instruction in program.instructions for value in instruction.outputs}
    pinned = tuple(value for value in (*program.inputs, *program.constants) if value not in made)
    outputs = tuple(dict.fromkeys(atom for atom in program.outputs if isinstance(atom, int)))
    ops = []
    for instruction in program.instructions:
        ops.append(_op(instruction, tensors, profile, outputs))
    return Graph(tuple(ops), tuple(tensors), pinned, outputs, free_order=False)


def _with_turning_point(graph: Graph, program: Program) -> Graph:
    """The graph with the end of its forward part.

    It is where idle bytes are most, unless that is in the middle of a backward part: the gradient of
    ``lax.associative_scan`` stores on its way down for its way up, and gradients of weights wait for the update. The
    forward part then ends before the first op of that backward part.
    """
    if not graph.ops:
        return graph
    turn = Problem.of(graph).turning_point
    at = turn
    while at and _stands_anywhere(graph, program, at):
        at -= 1
    pending, part = [at], set[int]()
    while pending:
        op = pending.pop()
        if op not in part and program.instructions[op].is_backward:
            part.add(op)
            makers = (graph.producer[value] for value in program.instructions[op].reads)
            pending += [maker for maker in makers if maker is not None]
    return dataclasses.replace(graph, turning_point=max(0, min(part) - 1) if part else turn)


def _stands_anywhere(graph: Graph, program: Program, op: int) -> bool:
    """Does the place of an op say nothing of the part that it is in?

    It reads arguments alone, or is of the forward part, and read by the backward part alone, to which it may have been
    moved.
    """
    if all(graph.producer[value] is None for value in graph.ops[op].inputs):
        return True
    readers = [reader for value in graph.ops[op].outputs for reader in graph.readers[value]]
    is_backward = [program.instructions[reader].is_backward for reader in readers]
    return not program.instructions[op].is_backward and bool(readers) and all(is_backward)


def after_donation(graph: Graph, program: Program, donated: Collection[int]) -> Graph:
    """The graph with results that take over the buffers of donated arguments, and so need no bytes of their own.

    Args:
        graph: of the program.
        program: the traced function.
        donated: numbers of the arguments whose buffers are given away. As in JAX, each result takes the first that is
            left of its shape and dtype.
    """
    pairs = taken_over(program, donated, lambda value: _kind(graph.tensors[value]))
    sizes = {value: 0 for _, value in pairs}
    return resized(graph, sizes)


def taken_over(program: Program, donated: Collection[int], kind: Callable[[int], Any]) -> list[tuple[int, int]]:
    """Pairs of a donated argument and the result that takes over its buffer.

    Args:
        program: the traced function.
        donated: as in ``after_donation``.
        kind: equal for values that may share a buffer.
    """
    left = [program.inputs[number] for number in donated]
    pairs = []
    for value in dict.fromkeys(atom for atom in program.outputs if isinstance(atom, int)):
        found = next((one for one in left if kind(one) == kind(value)), None)
        if found is not None and value not in (*program.inputs, *program.constants):
            left.remove(found)
            pairs.append((found, value))
    return pairs


def resized(graph: Graph, sizes: Mapping[int, int]) -> Graph:
    """The graph with other sizes, in bytes; a kernel writes over an input only where that is as large as its result."""
    tensors = tuple(
        dataclasses.replace(tensor, size_bytes=sizes[number]) if number in sizes else tensor
        for number, tensor in enumerate(graph.tensors)
    )
    ops = tuple(
        dataclasses.replace(
            op,
            in_place=tuple(pair for pair in op.in_place if len({tensors[number].size_bytes for number in pair}) == 1),
        )
        for op in graph.ops
    )
    return dataclasses.replace(graph, ops=ops, tensors=tensors)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.size_bytes


def _shape_and_dtype(aval: Any) -> tuple[tuple[int, ...] | None, str | None]:
    dtype = getattr(aval, "dtype", None)
    return tuple(getattr(aval, "shape", ())), None if dtype is None else str(dtype)


def _op(instruction: Instruction, tensors: list[Tensor], profile: DeviceProfile, outputs: tuple[int, ...]) -> Op:
    eqn = instruction.root
    name = f"{eqn.source_info.name_stack}/{eqn.primitive.name}".lstrip("/")
    alone = len(instruction.equations) == 1
    viewed = op_facts.viewed_inputs(eqn) if alone else (None,) * len(instruction.outputs)
    for place, value in enumerate(instruction.outputs):
        old = tensors[value]
        size = 0 if alone and op_facts.holds_nothing(eqn) else old.size_bytes
        at = viewed[place]
        source: Atom | None = None if at is None else instruction.equations[-1].inputs[at]
        alias_of = source if isinstance(source, int) else None
        tensors[value] = Tensor(size, f"{name}:{place}", old.shape, old.dtype, alias_of)
    return Op(
        name=name,
        kind=eqn.primitive.name,
        inputs=instruction.reads,
        outputs=instruction.outputs,
        time_s=_time_s(instruction, tensors, profile),
        recomputable=all(op_facts.may_repeat(equation.eqn) for equation in instruction.equations)
        and not any(value in outputs for value in instruction.outputs),
        workspace_bytes=_workspace_bytes(eqn, profile) * instruction.equations[-1].devices,
        in_place=_in_place(instruction, tensors),
    )


def _in_place(instruction: Instruction, tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Pairs of an input and the output: an element-wise kernel may write over an input as large as what it makes."""
    if len(instruction.outputs) != 1:
        return ()
    made = instruction.outputs[0]
    size = tensors[made].size_bytes
    if tensors[made].alias_of is not None or not size:
        return ()
    kept: set[int] = set()
    for equation in instruction.equations:
        changed = equation.inputs[op_facts.overwritable_inputs(equation.eqn)]
        if not changed:
            return ()
        kept.update(atom for atom in equation.reads if atom not in changed)
    return tuple(
        (value, made) for value in instruction.reads if tensors[value].size_bytes == size and value not in kept
    )


def _time_s(instruction: Instruction, tensors: list[Tensor], profile: DeviceProfile) -> float:
    """Predicted seconds of a kernel: its inner values do not go through memory."""
    eqn = instruction.root
    if any(True for _ in op_facts.inner_jaxprs(eqn)):
        return _body_time_s(eqn, profile) * instruction.equations[-1].devices
    if len(instruction.equations) == 1 and (op_facts.is_view(eqn) or op_facts.holds_nothing(eqn)):
        return 0.0
    moved = _bytes_read(instruction, tensors) + sum(tensors[value].size_bytes for value in instruction.outputs)
    work = sum(
        equation.devices * op_facts.flops(equation.eqn, on_cpu=profile.is_cpu) for equation in instruction.equations
    )
    dtype = tensors[instruction.outputs[0]].dtype if instruction.outputs else None
    return op_time_s(profile, work, moved, dtype or "float32")


def _bytes_read(instruction: Instruction, tensors: list[Tensor]) -> int:
    """Bytes that a kernel reads from memory: of an array that it takes a slice of, the slice alone."""
    sliced: dict[int, int] = {}
    whole: set[int] = set()
    for equation in instruction.equations:
        source = equation.inputs[0] if equation.inputs and op_facts.takes_slice(equation.eqn) else None
        for value in equation.reads:
            if value == source:
                made = equation.devices * sum(op_facts.size_bytes(var.aval) for var in equation.eqn.outvars)
                sliced[value] = sliced.get(value, 0) + made
            else:
                whole.add(value)
    return sum(
        tensors[value].size_bytes if value in whole else min(tensors[value].size_bytes, sliced[value])
        for value in instruction.reads
    )


def _body_time_s(eqn: JaxprEqn, profile: DeviceProfile) -> float:
    """Predicted seconds of a loop, a branch or a function with a rule of its own."""
    each = [graph_of_jaxpr(jaxpr, profile).time_s for jaxpr in op_facts.inner_jaxprs(eqn)]
    return op_facts.iterations(eqn) * (max(each) if eqn.primitive.name == "cond" else sum(each))


def _workspace_bytes(eqn: JaxprEqn, profile: DeviceProfile) -> int:
    """What an op needs besides its inputs and outputs: the body of a loop, the larger branch, copies on a CPU."""
    if op_facts.is_elementwise(eqn):
        return 0
    if profile.is_cpu and (copied := op_facts.workspace_bytes_on_cpu(eqn)):
        return copied
    return max((_body_bytes(jaxpr, profile) for jaxpr in op_facts.inner_jaxprs(eqn)), default=0)


def _body_bytes(jaxpr: Jaxpr, profile: DeviceProfile) -> int:
    body = graph_of_jaxpr(jaxpr, profile)
    peak = simulate(body, body.plain_schedule).peak_bytes - body.pinned_bytes
    return max(0, peak - sum(op_facts.size_bytes(var.aval) for var in jaxpr.outvars))


def graph_of_jaxpr(jaxpr: Jaxpr, profile: DeviceProfile) -> Graph:
    """The graph of a body whose captured arrays do not matter, for its bytes and seconds as it is."""
    key = id(jaxpr), id(profile)
    if key not in _bodies:
        closed = ClosedJaxpr(jaxpr, [object() for _ in jaxpr.constvars])
        _bodies[key] = jaxpr, profile, _graph_without_parts(program_of(closed), profile)
    _bodies.move_to_end(key)
    while len(_bodies) > _MOST_BODIES:
        _bodies.popitem(last=False)
    return _bodies[key][2]


_bodies: OrderedDict[tuple[int, int], tuple[Jaxpr, DeviceProfile, Graph]] = OrderedDict()
"""Graphs of bodies, with what they were made of, so that no identity is given to another object. A loop asks for its
body twice, for its seconds and for its bytes, and loops that no variant writes again are the same in all of them."""

_MOST_BODIES: Final = 128
"""A judgement: a function has tens of bodies, and each graph of one takes some 10 kB. Fewer, and they are made anew."""


def label_graph(graph: Graph, program: Program, roles: Sequence[str] = ()) -> Graph:
    """The graph of a program with scopes, source lines, phases and the roles of its inputs.

    Args:
        graph: of the program.
        program: as traced; its instructions are the ops of the graph.
        roles: for each input of the program its role; captured arrays are parameters.
    """
    of_inputs = dict(zip(program.inputs, roles, strict=False))
    of_inputs |= {number: "parameter" for number in program.constants if number in graph.inputs}
    pinned = {number: role for number, role in of_inputs.items() if number in graph.inputs}
    return labelled(graph, [_label(instruction) for instruction in program.instructions], pinned)


def _label(instruction: Instruction) -> OpLabel:
    stack = _private.scopes_of(instruction.root)
    line = _private.source_of(instruction.root)
    source = "" if line is None else f"{shown_path(line[0])}:{line[1]} in {line[2].rpartition('.')[2]}"
    return OpLabel("transpose(" in stack, _layer(stack) or _function(line), source)


def _layer(stack: str) -> str:
    while (shorter := _TRANSFORMED.sub(r"\1", stack)) != stack:
        stack = shorter
    return "/".join(part for part in stack.split("/") if part)


def _function(line: tuple[str, int, str] | None) -> str:
    """Plain functions have no scopes: what a line of ``layer`` made belongs to ``layer``."""
    return "" if line is None else line[2].rpartition(".")[2]
