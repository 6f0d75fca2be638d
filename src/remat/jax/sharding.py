"""Steps over several devices: which instructions get values from other devices, so that no plan repeats them.

Under automatic sharding the compiler adds the collectives, long after the trace. So the plain program is compiled once
with the number of each instruction in its name, and the compiler's text says which ones became collectives.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.sharding import NamedSharding

from remat.core.graph import Graph, Op, Tensor
from remat.jax import _private
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


@dataclass(frozen=True)
class Layout:
    """How a program lies on the devices.

    Attributes:
        collectives: the instructions that the compiler made into collectives.
        shardings: of each value that an instruction makes.
    """

    collectives: frozenset[int]
    shardings: Mapping[int, Any]


class Layouts:
    """How the ways to write a program lie on the devices.

    The plain one is compiled twice to find that: first with the number of each instruction in its name, which the
    compiler keeps; then with every value among its results, which shows the sharding of each value. Of another one that
    differs in the bodies of ``shard_map`` alone, as where their loops are written again, the rest lies as in the plain
    one, and what is in the bodies says itself how it lies.

    Args:
        shapes: of the arguments, with their shardings.
        tie: which options the compiler needs.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], tie: Tie) -> None:
        self._shapes = tuple(shapes)
        self._tie: Tie = tie
        self._plain: tuple[Program, Layout] | None = None

    def of(self, program: Program) -> Layout:
        """The layout of a program; the first one that is asked for is the plain one."""
        if self._plain is not None and (found := _alike(program, *self._plain)) is not None:
            return found
        layout = self._compiled(program)
        if self._plain is None:
            self._plain = program, layout
        return layout

    def _compiled(self, program: Program) -> Layout:
        captured = tuple(program.constants.values())
        arguments = (*self._shapes, *captured)
        count = len(self._shapes)
        named = named_run(program, _OP_NAME)
        run = Lowered(lambda *arrays: named(arrays[:count], arrays[count:]), arguments, self._tie, over_devices=True)
        _, text = run.memory_and_text()
        collectives = {int(n) for found in _COLLECTIVE.finditer(text) for n in _NUMBER.findall(found["rest"])}
        made = tuple(value for instruction in program.instructions for value in instruction.outputs)
        everything = named_run(dataclasses.replace(program, outputs=made), "")
        returned = Lowered(lambda *arrays: everything(arrays[:count], arrays[count:]), arguments, self._tie).compiled()
        return Layout(frozenset(collectives), dict(zip(made, returned.output_shardings, strict=True)))

    def on_one_device(self, program: Program, graph: Graph) -> tuple[Program, Graph]:
        """The program with its shardings, and the graph as one device sees it: its own share of each tensor.

        Every instruction that became a collective is marked as one that runs once. A plan's program asks for the same
        shardings. Otherwise the compiler would choose other shardings for values that are made again, and would send
        parameters for that.
        """
        layout = self.of(program)
        shardings = dict(layout.shardings)
        shardings.update(
            (value, shape.sharding) for value, shape in zip(program.inputs, self._shapes, strict=True) if shape.sharding
        )
        sizes = {number: _own_bytes(tensor, shardings.get(number)) for number, tensor in enumerate(graph.tensors)}

        def workspace(op: Op) -> int:
            """The body of a loop holds as small a share of its values as of what the loop reads and makes."""
            around = (*op.inputs, *op.outputs)
            whole = sum(graph.tensors[value].size_bytes for value in around)
            return op.workspace_bytes * sum(sizes[value] for value in around) // max(1, whole)

        ops = tuple(
            dataclasses.replace(
                op, workspace_bytes=workspace(op), recomputable=op.recomputable and number not in layout.collectives
            )
            for number, op in enumerate(graph.ops)
        )
        graph = resized(dataclasses.replace(graph, ops=ops), sizes)
        mapped = {v for instruction in program.instructions if instruction.is_mapped for v in instruction.outputs}
        asked = {
            value: one for value, one in shardings.items() if value not in mapped and not _private.is_in_the_type(one)
        }
        return dataclasses.replace(program, shardings=asked), graph


def _alike(program: Program, plain: Program, layout: Layout) -> Layout | None:
    """The layout of a program that differs from the plain one in the bodies of maps alone; None where more differs."""
    own, others = _outside_of_maps(program), _outside_of_maps(plain)
    if own is None or others is None or len(own) == len(program.instructions):
        return None
    if [_kind(program, number) for number in own] != [_kind(plain, number) for number in others]:
        return None
    shardings: dict[int, Any] = {}
    for number, other in zip(own, others, strict=True):
        pairs = zip(program.instructions[number].outputs, plain.instructions[other].outputs, strict=True)
        shardings.update((value, layout.shardings[known]) for value, known in pairs)
    for mapped in (instruction.equations[-1] for instruction in program.instructions):
        if mapped.mapped is not None:
            of, specs = mapped.mapped.map, mapped.mapped.out_specs
            shardings.update(
                (value, NamedSharding(of.mesh, spec)) for value, spec in zip(mapped.outputs, specs, strict=True)
            )
    collectives = (number for number, other in zip(own, others, strict=True) if other in layout.collectives)
    return Layout(frozenset(collectives), shardings)


def _outside_of_maps(program: Program) -> list[int] | None:
    """Numbers of the instructions outside of maps; None where one is partly inside, or a map leaves out devices."""
    found = []
    for number, instruction in enumerate(program.instructions):
        own = {equation.map for equation in instruction.equations}
        if len(own) > 1:
            return None
        of = own.pop()
        if of is None:
            found.append(number)
        elif not of.is_over_all_devices:
            return None
    return found


def _kind(program: Program, number: int) -> Any:
    instruction = program.instructions[number]
    avals = [program.avals[value] for value in instruction.outputs]
    return (
        [equation.eqn.primitive.name for equation in instruction.equations],
        [(getattr(aval, "shape", ()), getattr(aval, "dtype", None)) for aval in avals],
    )


def _own_bytes(tensor: Tensor, sharding: Any) -> int:
    if sharding is None or not tensor.shape or not tensor.size_bytes:
        return tensor.size_bytes
    own: int = math.prod(sharding.shard_shape(tensor.shape))
    return tensor.size_bytes * own // math.prod(tensor.shape)
