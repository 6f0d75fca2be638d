"""The real peak of a schedule: what the compiler says of the memory of the compiled program."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from remat.core.errors import UnsupportedStep
from remat.core.schedule import Schedule
from remat.fit.peaks import PeakRange
from remat.jax import _buffers, _private
from remat.jax._buffers import ProgramMemory
from remat.jax.context import Tie
from remat.jax.emit.evaluate import FlatFunction, emit
from remat.jax.mapped import MappedFunction
from remat.jax.trace.program import Program

KEEP_BARRIERS: Final = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA on a CPU takes barriers out before it merges equal computations, which undoes every recomputation.

The name of the pass is that of jaxlib 0.10. If it changes, barriers hold nothing back on a CPU, and the tests that
compare ``remat.jax.jit`` with ``jax.jit`` fail.
"""

_QUICK: Final[dict[str, Any]] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Machine code is made after buffers have been assigned, so its quality does not matter for memory."""

REFUSED: Final = PeakRange.exactly(1 << 52)
"""The peak of a program that sends more between devices than the plain one. No device has so many bytes, so no budget
accepts such a program."""


def compiler_options(tie: Tie) -> dict[str, str]:
    """What ``jax.jit`` needs to keep ties of this kind on the current platform."""
    return dict(KEEP_BARRIERS) if tie == "barrier" and jax.default_backend() == "cpu" else {}


def peak_of(memory: Any) -> int:
    """Peak device bytes of a program by ``compiled.memory_analysis()``: arguments, results and everything between.

    Raises:
        UnsupportedStep: where the platform does not say.
    """
    if memory is None:
        raise UnsupportedStep(
            f"the compiler for {jax.default_backend()!r} does not say how much memory a program needs, so no budget "
            "can be held; give plan= instead of budget="
        )
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def memory_of(memory: Any) -> ProgramMemory:
    """What a program takes by ``compiled.memory_analysis()``.

    Raises:
        UnsupportedStep: where the platform does not say.
    """
    return ProgramMemory(peak_of(memory), int(memory.temp_size_in_bytes))


class Compiler:
    """Compiles schedules of one program and remembers their peaks.

    Args:
        program: the traced function.
        turning_point: the instruction that ends its forward part.
        tie: how recomputations are held back.
        arguments: the flat arguments: shapes and dtypes, and shardings where known.
        donated: which flat arguments' buffers the results may take over.
        accept: takes a compiled program; the peak of one that it does not accept is ``REFUSED``.
        returned: where the results go; None leaves that to the compiler.
        mapped: where the program is the body of a ``shard_map``, the function around it, which is what is compiled.
    """

    def __init__(
        self,
        program: Program,
        turning_point: int,
        tie: Tie,
        arguments: Sequence[jax.ShapeDtypeStruct],
        donated: Sequence[int] = (),
        accept: Callable[[Any], bool] | None = None,
        returned: Returned | None = None,
        mapped: MappedFunction | None = None,
    ) -> None:
        self._accept = accept
        self._program = program
        self._turning_point = turning_point
        self._tie = tie
        self._arguments = tuple(arguments)
        self._donated = tuple(donated)
        self._returned = returned
        self._mapped = mapped
        self._known: dict[Schedule, PeakRange] = {}

    def peak(self, schedule: Schedule) -> PeakRange:
        """Peak bytes of one device under a schedule. Compiles, unless the schedule is known."""
        if schedule not in self._known:
            self._known[schedule] = self._peak(self._lowered(schedule))
        return self._known[schedule]

    def _peak(self, lowered: Lowered) -> PeakRange:
        if self._accept is None:
            return lowered.peak()
        compiled = lowered.compiled()  # What is asked of the program needs the one that will run.
        return _range_of(memory_of(compiled.memory_analysis())) if self._accept(compiled) else REFUSED

    def compile(self, schedule: Schedule) -> Any:
        """The compiled program of a schedule, as ``jax.stages.Compiled``."""
        return self._lowered(schedule).compiled()

    def _lowered(self, schedule: Schedule) -> Lowered:
        run, whole = emitted(self._program, schedule, self._turning_point, self._tie, self._mapped)
        count = len(self._arguments)

        def function(*arrays: Any) -> Any:
            results = run(arrays[:count], arrays[count:])
            return results if self._returned is None else jax.tree.unflatten(self._returned.structure, results)

        captured = tuple(whole.constants.values())
        shardings = None if self._returned is None else self._returned.shardings
        return Lowered(function, (*self._arguments, *captured), self._tie, self._donated, shardings)


def emitted(
    program: Program, schedule: Schedule, turning_point: int, tie: Tie, mapped: MappedFunction | None = None
) -> tuple[FlatFunction, Program]:
    """The function that evaluates a program by a schedule, and the program whose arguments and constants it takes.

    Args:
        program: the traced function, or the body of a ``shard_map``.
        schedule: as in ``emit``.
        turning_point: likewise.
        tie: likewise.
        mapped: the function around that body.
    """
    run = emit(program, schedule, turning_point, tie)
    if mapped is None:
        return run, program
    constants = tuple(program.constants.values())
    return mapped.with_body(lambda *own: run(own, constants)), mapped.program


@dataclass(frozen=True)
class Returned:
    """Where the results of a function over several devices go.

    Attributes:
        structure: of the results.
        shardings: as ``out_shardings`` of ``jax.jit``.
    """

    structure: Any
    shardings: Any


class Lowered:
    """A function that is compiled with no more work than it takes to know its memory.

    Args:
        function: of flat arguments.
        arguments: of arrays, only the shapes count.
        tie: how recomputations are held back.
        donated: which arguments' buffers the results may take over.
        out_shardings: as in ``jax.jit``.
    """

    def __init__(
        self, function: Any, arguments: Sequence[Any], tie: Tie, donated: Sequence[int] = (), out_shardings: Any = None
    ) -> None:
        self._function = function
        self._shapes = jax.tree.map(
            lambda a: a if isinstance(a, jax.ShapeDtypeStruct) else shape_of(a), tuple(arguments)
        )
        self._jit_options: dict[str, Any] = {"donate_argnums": tuple(donated)}
        if out_shardings is not None:
            self._jit_options["out_shardings"] = out_shardings
        self._tie = tie

    def compiled(self) -> Any:
        """The program, as ``jax.stages.Compiled``."""
        return self._lowered(self._function).compile(compiler_options=self._options())

    def peak(self) -> PeakRange:
        """What the compiler says of the program's memory; remembered, so that equal programs are looked at once.

        Raises:
            UnsupportedStep: where the platform does not say.
        """
        is_read_early = jax.default_backend() == "cpu"
        lowered = self._lowered(_buffers.stopping(self._function) if is_read_early else self._function)
        text = repr((self._options(), jax.devices(), lowered.as_text()))
        key = hashlib.sha256(text.encode()).digest()
        if key not in _known:
            memory = _buffers.assigned_memory(lowered, self._options()) if is_read_early else None
            _known[key] = memory_of(self.compiled().memory_analysis()) if memory is None else memory
        _known.move_to_end(key)
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
        return _range_of(_known[key])

    def _lowered(self, function: Any) -> Any:
        return jax.jit(function, **self._jit_options).lower(*self._shapes)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = dict(compiler_options(self._tie))
        if jax.default_backend() == "cpu":
            options |= _QUICK
        return options


def _range_of(memory: ProgramMemory) -> PeakRange:
    return PeakRange(memory.peak_bytes, memory.peak_bytes, memory.temporary_bytes)


_known: OrderedDict[bytes, ProgramMemory] = OrderedDict()
"""The memory of programs, by the hash of their text and options. A step that is planned for a second budget, as after a
refusal, looks at its plain form once less."""

_MOST_KNOWN: Final = 256
"""A judgement: some ten programs a budget, of which a few bytes each are kept. With fewer, the programs of a step that
is planned for many budgets are looked at anew."""


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, for an array that lies on devices, sharding of a value."""
    aval = jax.typeof(array)
    sharding = array.sharding if isinstance(array, jax.Array) and _is_sharded(array) else None
    make: Any = jax.ShapeDtypeStruct
    weak_type = bool(getattr(aval, "weak_type", False))
    return make(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-any-return]


def _is_sharded(array: jax.Array) -> bool:
    return not _private.is_traced(array) and isinstance(array.sharding, jax.sharding.NamedSharding)
