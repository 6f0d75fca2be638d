"""Steps over several devices: which instructions get values from other devices, so that no plan repeats them.

Under automatic sharding the compiler adds the collectives, long after the trace. So the plain program is compiled once
with the number of each instruction in its name, and the compiler's text says which ones became collectives.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import jax

from remat.core.graph import Graph, Op, Tensor
from remat.jax.context import Tie
from remat.jax.emit.evaluate import named_run
from remat.jax.peak import Lowered
from remat.jax.scans.loops import BODY_NAME
from remat.jax.trace.graph import resized
from remat.jax.trace.program import Program

_COLLECTIVE: Final = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)"
    r"(?:-start)?\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
"""A collective in the compiler's text, HLO. One that is missing here would be repeated by plans, and sends more."""

_OP_NAME: Final = "remat_op_"
_NUMBER: Final = re.compile(_OP_NAME + r"(\d+)")
_BODY_VALUE: Final = re.compile(BODY_NAME + r"(\d+)_(\d+)")


def arrays_sent(text: str) -> int:
    """How many arrays a compiled program sends; collectives that the compiler has combined count by their operands."""
    return sum(1 + found["operands"].count(",") for found in _COLLECTIVE.finditer(text))


def received_in_bodies(run: Any, shapes: Sequence[jax.ShapeDtypeStruct], tie: Tie) -> dict[int, frozenset[int]]:
    """By the number of a loop, the values of its body that the compiled function gets from other devices.

    Args:
        run: the flat function, its loops written by ``remat.jax.scans.loops``.
        shapes: of its arguments, with their shardings.
        tie: which options the compiler needs.
    """
    found: dict[int, set[int]] = {}
    _, text = Lowered(run, shapes, tie, over_devices=True).memory_and_text()
    for collective in _COLLECTIVE.finditer(text):
        for loop, value in _BODY_VALUE.findall(collective["rest"]):
            found.setdefault(int(loop), set()).add(int(value))
    return {loop: frozenset(values) for loop, values in found.items()}


def on_one_device(
    program: Program, graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct], tie: Tie
) -> tuple[Program, Graph]:
    """The program with its shardings, and the graph as one device sees it: its own share of each tensor.

    Every instruction that became a collective is marked as one that runs once. The plain program is compiled twice to
    find them: first with the number of each instruction in its name, which the compiler keeps; then with every value
    among its results, which shows the sharding of each value. A plan's program asks for the same shardings. Otherwise
    the compiler would choose other shardings for values that are made again, and would send parameters for that.
    """
    captured = tuple(program.constants.values())
    arguments = (*shapes, *captured)
    count = len(shapes)
    named = named_run(program, _OP_NAME)
    run = Lowered(lambda *arrays: named(arrays[:count], arrays[count:]), arguments, tie, over_devices=True)
    _, text = run.memory_and_text()
    collectives = {int(n) for found in _COLLECTIVE.finditer(text) for n in _NUMBER.findall(found["rest"])}
    made = tuple(value for instruction in program.instructions for value in instruction.outputs)
    everything = named_run(dataclasses.replace(program, outputs=made), "")
    returned = Lowered(lambda *arrays: everything(arrays[:count], arrays[count:]), arguments, tie).compiled()
    shardings = dict(zip(made, returned.output_shardings, strict=True))
    shardings.update(
        (value, shape.sharding) for value, shape in zip(program.inputs, shapes, strict=True) if shape.sharding
    )
    sizes = {number: _own_bytes(tensor, shardings.get(number)) for number, tensor in enumerate(graph.tensors)}

    def workspace(op: Op) -> int:
        """The body of a loop holds as small a share of its values as of what the loop reads and makes."""
        around = (*op.inputs, *op.outputs)
        whole = sum(graph.tensors[value].size_bytes for value in around)
        return op.workspace_bytes * sum(sizes[value] for value in around) // max(1, whole)

    ops = tuple(
        dataclasses.replace(
            op, workspace_bytes=workspace(op), recomputable=op.recomputable and number not in collectives
        )
        for number, op in enumerate(graph.ops)
    )
    graph = resized(dataclasses.replace(graph, ops=ops), sizes)
    mapped = {v for instruction in program.instructions if instruction.is_mapped for v in instruction.outputs}
    asked = {value: one for value, one in shardings.items() if value not in mapped and not _is_in_the_type(one)}
    return dataclasses.replace(program, shardings=asked), graph


def _is_in_the_type(sharding: Any) -> bool:
    """Is a sharding a part of the types of values, as over the explicit axes of a mesh? No compiler changes it then."""
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return any(kind == jax.sharding.AxisType.Explicit for kind in kinds)


def _own_bytes(tensor: Tensor, sharding: Any) -> int:
    if sharding is None or not tensor.shape or not tensor.size_bytes:
        return tensor.size_bytes
    own: int = math.prod(sharding.shard_shape(tensor.shape))
    return tensor.size_bytes * own // math.prod(tensor.shape)
