"""The real peak of a schedule: what the compiler says of the memory of the compiled program."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from remat.core.errors import UnsupportedStep
from remat.core.schedule import Schedule
from remat.fit.peaks import PeakRange
from remat.jax import _buffers, _private
from remat.jax._buffers import ProgramMemory
from remat.jax.context import Tie
from remat.jax.emit.evaluate import FlatFunction, emit
from remat.jax.mapped import MappedFunction
from remat.jax.trace.maps import NAME
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
        accept: takes the compiler's text of a program; the peak of one that it does not accept is ``REFUSED``.
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
        accept: Callable[[str], bool] | None = None,
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
        memory, text = lowered.memory_and_text()
        return _range_of(memory) if self._accept(text) else REFUSED

    def memory_and_text(self, schedule: Schedule) -> tuple[ProgramMemory, str]:
        """Of the program of a schedule: what it takes, and the compiler's text of it."""
        return self._lowered(schedule).memory_and_text()

    def compile(self, schedule: Schedule) -> Any:
        """The compiled program of a schedule, as ``jax.stages.Compiled``."""
        return self._lowered(schedule).compiled()

    def _is_over_devices(self) -> bool:
        instructions = self._program.instructions
        is_mapped = any(
            one.is_mapped or any(e.eqn.primitive.name == NAME for e in one.equations) for one in instructions
        )
        return is_mapped or self._mapped is not None or is_sharded(self._arguments)

    def _lowered(self, schedule: Schedule) -> Lowered:
        run, whole = emitted(self._program, schedule, self._turning_point, self._tie, self._mapped, self._donated)
        count = len(self._arguments)

        def function(*arrays: Any) -> Any:
            results = run(arrays[:count], arrays[count:])
            return results if self._returned is None else jax.tree.unflatten(self._returned.structure, results)

        captured = tuple(whole.constants.values())
        shardings = None if self._returned is None else self._returned.shardings
        arguments, over_devices = (*self._arguments, *captured), self._is_over_devices()
        return Lowered(function, arguments, self._tie, self._donated, shardings, over_devices=over_devices)


def emitted(
    program: Program,
    schedule: Schedule,
    turning_point: int,
    tie: Tie,
    mapped: MappedFunction | None = None,
    donated: Sequence[int] = (),
) -> tuple[FlatFunction, Program]:
    """The function that evaluates a program by a schedule, and the program whose arguments and constants it takes.

    Args:
        program: the traced function, or the body of a ``shard_map``.
        schedule: as in ``emit``.
        turning_point: likewise.
        tie: likewise.
        mapped: the function around that body.
        donated: as in ``emit``, of the function around it.
    """
    run = emit(program, schedule, turning_point, tie, donated if mapped is None else ())
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
        over_devices: does the program run on several devices, wherever its arguments lie?
    """

    def __init__(
        self,
        function: Any,
        arguments: Sequence[Any],
        tie: Tie,
        donated: Sequence[int] = (),
        out_shardings: Any = None,
        *,
        over_devices: bool = False,
    ) -> None:
        self._function = function
        self._shapes = jax.tree.map(
            lambda a: a if isinstance(a, jax.ShapeDtypeStruct) else shape_of(a), tuple(arguments)
        )
        self._jit_options: dict[str, Any] = {"donate_argnums": tuple(donated)}
        if out_shardings is not None:
            self._jit_options["out_shardings"] = out_shardings
        self._tie = tie
        self._over_devices = over_devices or is_sharded(jax.tree.leaves(self._shapes))

    def compiled(self) -> Any:
        """The program, as ``jax.stages.Compiled``."""
        return self._lowered(self._function).compile(compiler_options=self._options())

    def memory_and_text(self) -> tuple[ProgramMemory, str]:
        """What the program takes, and the compiler's text of it, which shows what is sent between devices.

        Raises:
            UnsupportedStep: where the platform does not say.
        """
        if jax.default_backend() == "cpu" and self._over_devices:
            found = _buffers.assigned_over_devices(self._stopping(), self._options())
            if found is not None:
                return found
        compiled = self.compiled()
        return memory_of(compiled.memory_analysis()), compiled.as_text()

    def peak(self) -> PeakRange:
        """What the compiler says of the program's memory; remembered, so that equal programs are looked at once.

        Raises:
            UnsupportedStep: where the platform does not say.
        """
        is_read_early = jax.default_backend() == "cpu"
        lowered = self._stopping() if is_read_early else self._lowered(self._function)
        text = repr((self._options(), jax.devices(), lowered.as_text()))
        key = hashlib.sha256(text.encode()).digest()
        if key not in _known:
            memory = self._assigned(lowered) if is_read_early else None
            _known[key] = memory_of(self.compiled().memory_analysis()) if memory is None else memory
        _known.move_to_end(key)
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
        return _range_of(_known[key])

    def _assigned(self, stopping: Any) -> ProgramMemory | None:
        if not self._over_devices:
            return _buffers.assigned_memory(stopping, self._options())
        found = _buffers.assigned_over_devices(stopping, self._options())
        return None if found is None else found[0]

    def _stopping(self) -> Any:
        options = dict(self._jit_options)
        if self._over_devices and "out_shardings" in options:
            options["out_shardings"] = options["out_shardings"], None
        function = _buffers.stopping(self._function, over_devices=self._over_devices)
        return jax.jit(function, **options).lower(*self._shapes)

    def _lowered(self, function: Any) -> Any:
        return jax.jit(function, **self._jit_options).lower(*self._shapes)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = dict(compiler_options(self._tie))
        if jax.default_backend() == "cpu":
            options |= _QUICK
        return options


def is_sharded(shapes: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Do the arguments lie on several devices?"""
    return any(shape.sharding is not None and len(shape.sharding.device_set) > 1 for shape in shapes)


def _range_of(memory: ProgramMemory) -> PeakRange:
    return PeakRange(memory.peak_bytes, memory.peak_bytes, memory.temporary_bytes)


_known: OrderedDict[bytes, ProgramMemory] = OrderedDict()
"""The memory of programs, by the hash of their text and options. A step that is planned for a second budget, as after a
refusal, looks at its plain form once less."""

_MOST_KNOWN: Final = 256
"""A judgement: some ten programs a budget, of which a few bytes each are kept. With fewer, the programs of a step that
is planned for many budgets are looked at anew."""


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, where it is known, sharding of a value: of an array, or in the type of a traced value.

    Raises:
        UnsupportedStep: for a ``jax.Ref``.
    """
    aval = jax.typeof(array)
    if _private.is_reference(aval):
        raise UnsupportedStep(
            f"an argument is a jax.Ref of type {aval}, which a planned function cannot change in place; return the new "
            "value instead, or give a budget to the gradients alone with remat.jax.value_and_grad"
        )
    sharding = array.sharding if isinstance(array, jax.Array) and _is_sharded(array) else _explicit_sharding(aval)
    make: Any = jax.ShapeDtypeStruct
    weak_type = bool(getattr(aval, "weak_type", False))
    return make(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-any-return]


def _explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding over a mesh with explicit axes, which is a part of a value's type; None for others.

    A type names no devices: which they are changes no bytes.
    """
    sharding: Any = getattr(aval, "sharding", None)
    if not _private.is_in_the_type(sharding):
        return None
    mesh = sharding.mesh
    if AxisType.Manual in mesh.axis_types or mesh.size > jax.device_count():
        return None
    devices = np.asarray(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return NamedSharding(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), sharding.spec)


def _is_sharded(array: jax.Array) -> bool:
    return not _private.is_traced(array) and isinstance(array.sharding, NamedSharding)
