"""What a program takes on a CPU, read from the compiler's assignment of buffers, before any machine code is made.

XLA assigns buffers after its passes over the program and before it makes kernels. On the models of the zoo that takes
.04 to .8 s where compiling takes .5 to 9. ``stopping`` puts a call of a function that nobody registered into a program,
at which the compiler gives up once it begins with kernels; ``assigned_memory`` reads the assignment that XLA has
written to a folder by then. Both the error and the file are private to XLA: where either is not as expected, there is
no figure, and a program has to be compiled. ``tests/jax/test_jax_peaks.py`` compares the figures with those of compiled
programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax

_TARGET: Final = "remat_stops_the_compiler_here"
"""The name of the function that nobody registered. Were it registered, programs would be compiled to the end."""

_FILES: Final = "*.cpu_after_optimizations.hlo.pb"
"""The file with the assignment, by the name of jaxlib 0.10. Without it, there is no figure."""

_TEXTS: Final = "*.cpu_after_optimizations.txt"
"""The file with the text of the program, likewise."""

_ADDRESS_BYTES: Final = 8
_NUMBER_BYTES: Final = 4
"""What the compiler counts for each of several results, and for the number that ``stopping`` may add to them."""

# Numbers of fields in XLA's ``hlo.proto``, which have not changed since 2017.
_ASSIGNMENT: Final = 3  # of HloProto
_ALLOCATION: Final = 3  # of BufferAssignmentProto
_SIZE, _IS_THREAD_LOCAL, _IS_PARAMETER, _LIVES_ON, _IS_CONSTANT = 2, 3, 5, 7, 12  # of BufferAllocationProto


def stopping(function: Callable[..., Any], *, over_devices: bool = False) -> Callable[..., Any]:
    """The function, with a call at which the compiler gives up when it begins to make kernels.

    Args:
        function: any.
        over_devices: does the program run on several devices? What is called for its effect needs a sharding there,
            which JAX does not give it. So the call returns a number, which the function returns beside its results.
    """

    def stopped(*arguments: Any) -> Any:
        if not over_devices:
            jax.ffi.ffi_call(_TARGET, (), has_side_effect=True)()
            return function(*arguments)
        number: Any = jax.ShapeDtypeStruct
        call: Any = jax.ffi.ffi_call(_TARGET, number((), "float32"), has_side_effect=False)
        return function(*arguments), call()

    return stopped


@dataclass(frozen=True)
class ProgramMemory:
    """What a program takes.

    Attributes:
        peak_bytes: of arguments, results and all between, what they share counted once.
        temporary_bytes: of what is neither argument nor result. A run asks for it in one block.
    """

    peak_bytes: int
    temporary_bytes: int


def assigned_memory(lowered: Any, options: Mapping[str, Any]) -> ProgramMemory | None:
    """The memory of a program that ``stopping`` made.

    Args:
        lowered: the program, as ``jax.stages.Lowered``.
        options: of the compiler.

    Returns:
        What ``memory_analysis`` says of the program without the call, or a little more (60 bytes in two programs seen);
        None where the compiler does not go about it as expected.
    """
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        return _assigned_memory(lowered, options, Path(folder))


def assigned_over_devices(lowered: Any, options: Mapping[str, Any]) -> tuple[ProgramMemory, str] | None:
    """The memory of a program that ``stopping`` made for several devices, and its text, which shows what is sent.

    Args:
        lowered: as in ``assigned_memory``.
        options: likewise.
    """
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        found = _assigned_memory(lowered, {**options, "xla_dump_hlo_as_text": True}, Path(folder))
        texts = list(Path(folder).glob(_TEXTS))
        if found is None or len(texts) != 1:
            return None
        # A program with one result does not count an address for it.
        results = len(jax.tree.leaves(lowered.out_info)) - 1
        added_bytes = _NUMBER_BYTES + _ADDRESS_BYTES * (1 if results > 1 else 2 if results else 0)
        text = texts[0].read_text(encoding="utf-8", errors="replace")
        return ProgramMemory(found.peak_bytes - added_bytes, found.temporary_bytes), text


def _assigned_memory(lowered: Any, options: Mapping[str, Any], folder: Path) -> ProgramMemory | None:
    try:
        lowered.compile(compiler_options={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True})
    except jax.errors.JaxRuntimeError as error:
        written = list(folder.glob(_FILES)) if _TARGET in str(error) else []
        return _memory_of_allocations(memoryview(written[0].read_bytes())) if len(written) == 1 else None
    return None


def _memory_of_allocations(written: memoryview) -> ProgramMemory | None:
    total, temporary, found = 0, 0, False
    for number, assignment in _fields(written):
        for own, allocation in _fields(assignment) if number == _ASSIGNMENT else ():
            if own != _ALLOCATION:
                continue
            found = True
            facts = dict(_fields(allocation))
            is_inside = facts.get(_IS_THREAD_LOCAL) or facts.get(_IS_CONSTANT)
            is_outside = facts.get(_IS_PARAMETER) or facts.get(_LIVES_ON)
            if is_outside or not is_inside:
                total += facts.get(_SIZE, 0)
            if not is_outside and not is_inside:
                temporary += facts.get(_SIZE, 0)
    return ProgramMemory(total, temporary) if found else None


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a message as protocol buffers encode it; of numbers with a sign, the bits."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        match key & 7:
            case 0:
                yield key >> 3, number()
            case kind:
                size = number() if kind == 2 else 8 if kind == 1 else 4
                yield key >> 3, message[at : at + size]
                at += size
