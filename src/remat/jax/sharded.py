"""Steps over several devices: which instructions talk to other devices, so that no plan repeats them.

Under automatic sharding the compiler adds the collectives, long after the trace. So the plain program is compiled once
with the number of each instruction in its name, and the compiler's text says which ones became collectives.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import jax

from remat.graph import Graph
from remat.jax.compiled import compile_quickly
from remat.jax.emit import named_run
from remat.jax.holds import Tie
from remat.jax.program import Program

_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)"
    r"(?:-start)?\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_NUMBER = re.compile(r"remat_op_(\d+)")


def is_sharded(shapes: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Do the arguments lie on several devices?"""
    return any(shape.sharding is not None and len(shape.sharding.device_set) > 1 for shape in shapes)


def communications(text: str) -> int:
    """How many arrays a compiled program sends; collectives that the compiler has combined count by their operands."""
    return sum(1 + found["operands"].count(",") for found in _COLLECTIVE.finditer(text))


def without_repeated_communication(
    program: Program, graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct], tie: Tie
) -> Graph:
    """The graph with every instruction that became a collective marked as one that runs once."""
    count = len(shapes)
    run = named_run(program, "remat_op_")
    captured = tuple(program.constants.values())
    compiled = compile_quickly(lambda *arrays: run(arrays[:count], arrays[count:]), (*shapes, *captured), tie)
    talking = {
        int(number) for found in _COLLECTIVE.finditer(compiled.as_text()) for number in _NUMBER.findall(found["rest"])
    }
    ops = tuple(
        dataclasses.replace(op, recomputable=op.recomputable and number not in talking)
        for number, op in enumerate(graph.ops)
    )
    return dataclasses.replace(graph, ops=ops)
