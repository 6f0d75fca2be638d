"""Which named scope and which line of source made each instruction, and what the arguments are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from remat.core.graph import Graph
from remat.core.labels import OpLabel, labelled, shown_path
from remat.jax import _private
from remat.jax.trace.program import Instruction, Program

# What JAX's transformations put around the names of scopes: "transpose(jvp(Encoder))/Dense_0".
_TRANSFORMED = re.compile(r"(?:transpose|jvp|vmap|checkpoint|rematted_computation|pjit|jit)\(([^()]*)\)")


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
