"""What a function needs under XLA: the buffers of the compiled program, read off its schedule.

XLA fuses operations, so the tensors of the graph say little of the memory of the program. The compiled program is
scheduled, and from its text follow the outputs and the size of the one block of temporary memory that it allocates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^)]*.*\)) -> .* \{$")
_ALIASED_OUTPUT = re.compile(r"\{(\d+)\}: \(")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-]+)")
_VIEWS = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "while"})
_NO_BUFFER = frozenset({"parameter", "constant", "after-all"})
_IN_PLACE = frozenset({"add", "dynamic-update-slice", "fusion", "multiply", "negate", "subtract", "tanh"})
_ELEMENT_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ALIGNMENT_BYTES = 64


_Buffer: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class CompiledMemory:
    """Buffers that one call of a compiled function allocates.

    Attributes:
        output_bytes: one entry for each output, allocated before the program runs.
        temporary_bytes: the block for everything in between.
    """

    output_bytes: tuple[int, ...]
    temporary_bytes: int


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    index: int
    is_root: bool


def program_memory(text: str) -> CompiledMemory:
    """The buffers of a scheduled program in XLA's text form."""
    computations, entry = _parse(text)
    instructions = computations[entry]
    root = next(i for i in instructions if i.is_root)
    returned = root.operands if root.opcode == "tuple" else (root.name,)
    by_name = {i.name: i for i in instructions}
    outputs = [sum(by_name[name].sizes) for name in returned if name in by_name]
    parameters = {i.name for i in instructions if i.opcode == "parameter"}
    updated_in_place = {int(number) for number in _ALIASED_OUTPUT.findall(_header(text))}
    outputs = [
        size
        for number, (name, size) in enumerate(zip(returned, outputs, strict=False))
        if name not in parameters and number not in updated_in_place
    ]
    return CompiledMemory(tuple(outputs), _temporary_bytes(computations, entry, frozenset(returned)))


def _header(text: str) -> str:
    """The part of the first line that says which outputs are written into the memory of inputs."""
    return text.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]


def _temporary_bytes(
    computations: Mapping[str, Sequence[_Instruction]], name: str, elsewhere: frozenset[str] = frozenset()
) -> int:
    """The largest sum of buffers alive at once, the values in ``elsewhere`` left out."""
    instructions = computations[name]
    lives = _Lifetimes(instructions)
    not_here = {buffer for returned in elsewhere for buffer in lives.buffers_of(returned)}
    size = {buffer: 0 if buffer in not_here else bytes_ for buffer, bytes_ in lives.size.items()}
    dying: dict[int, list[_Buffer]] = {}
    for buffer, step in lives.last.items():
        dying.setdefault(step, []).append(buffer)
    live = 0
    peak = 0
    for step, instruction in enumerate(instructions):
        own = [b for b in lives.buffers_of(instruction.name) if b[0] == instruction.name]
        live += sum(size[b] for b in own)
        lent = sorted(size[b] for b in dying.get(step, ()) if b[0] != instruction.name)
        shared = _shared_bytes([size[b] for b in own], lent) if instruction.opcode in _IN_PLACE else 0
        nested = max((_nested_bytes(computations, c) for c in instruction.called), default=0)
        peak = max(peak, live - shared + nested)
        live -= sum(size[b] for b in dying.get(step, ()))
    return peak


def _shared_bytes(results: Sequence[int], lent: list[int]) -> int:
    """Bytes of results that take over the buffer of an operand of at least their size."""
    shared = 0
    for size in sorted(results, reverse=True):
        fitting = next((n for n, other in enumerate(lent) if other >= size), None)
        if fitting is not None:
            shared += size
            del lent[fitting]
    return shared


class _Lifetimes:
    """Which buffers hold each value of a computation, and the last instruction that uses each."""

    def __init__(self, instructions: Sequence[_Instruction]) -> None:
        self.size: dict[_Buffer, int] = {}
        self.last: dict[_Buffer, int] = {}
        self._elements: dict[str, list[tuple[_Buffer, ...]]] = {}
        for step, instruction in enumerate(instructions):
            for operand in instruction.operands:
                for buffer in self.buffers_of(operand):
                    self.last[buffer] = step
            self._elements[instruction.name] = self._make(instruction, step)

    def buffers_of(self, value: str) -> list[_Buffer]:
        """The buffers behind a value, all elements of a tuple together."""
        return [buffer for element in self._elements.get(value, ()) for buffer in element]

    def _make(self, instruction: _Instruction, step: int) -> list[tuple[_Buffer, ...]]:
        if instruction.opcode in _NO_BUFFER:
            return [() for _ in instruction.sizes]
        if instruction.opcode == "tuple":
            return [tuple(self.buffers_of(operand)) for operand in instruction.operands]
        if instruction.opcode == "get-tuple-element":
            elements = self._elements.get(instruction.operands[0], [])
            return [elements[instruction.index]] if instruction.index < len(elements) else [()]
        if instruction.opcode in _VIEWS:
            return self._elements.get(instruction.operands[0], [()])
        for number, bytes_ in enumerate(instruction.sizes):
            self.size[instruction.name, number] = -(-bytes_ // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self.last[instruction.name, number] = step
        return [((instruction.name, number),) for number in range(len(instruction.sizes))]


def _nested_bytes(computations: Mapping[str, Sequence[_Instruction]], name: str) -> int:
    """A called computation writes its result into the caller's buffer."""
    roots = {i.name for i in computations.get(name, ()) if i.is_root}
    return _temporary_bytes(computations, name, frozenset(roots)) if name in computations else 0


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry = ""
    current: list[_Instruction] = []
    for line in text.splitlines():
        if line.endswith("{") and (header := _COMPUTATION.match(line)):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            operands, _, attributes = match[5].partition(")")
            opcode = match[4]
            called = tuple(_CALLED.findall(attributes)) if opcode in ("while", "call", "conditional") else ()
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            index = _INDEX.search(attributes)
            number = int(index[1]) if index else 0
            current.append(_Instruction(match[2], opcode, _sizes(match[3]), names, called, number, bool(match[1])))
    return computations, entry


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(
        math.prod(int(d) for d in dimensions.split(",") if d) * _element_bits(kind) // 8
        for kind, dimensions in _ARRAY.findall(shape)
    )


def _element_bits(kind: str) -> int:
    if kind in _ELEMENT_BITS:
        return _ELEMENT_BITS[kind]
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 0
