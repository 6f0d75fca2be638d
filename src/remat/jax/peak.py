"""The real peak of a schedule: what the compiler says of the memory of the compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from remat.core.errors import UnsupportedStep
from remat.core.schedule import Schedule
from remat.fit.peaks import PeakRange
from remat.jax import _private
from remat.jax.context import Tie
from remat.jax.emit.evaluate import emit
from remat.jax.trace.program import Program

KEEP_BARRIERS: Final = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""XLA on a CPU takes barriers out before it merges equal computations, which undoes every recomputation.

The name of the pass is that of jaxlib 0.10. If it changes, barriers hold nothing back on a CPU, and the tests that
compare ``remat.jax.jit`` with ``jax.jit`` fail.
"""

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
    ) -> None:
        self._accept = accept
        self._program = program
        self._turning_point = turning_point
        self._tie = tie
        self._arguments = tuple(arguments)
        self._donated = tuple(donated)
        self._returned = returned
        self._known: dict[Schedule, PeakRange] = {}

    def peak(self, schedule: Schedule) -> PeakRange:
        """Peak bytes of one device under a schedule. Compiles, unless the schedule is known."""
        if schedule not in self._known:
            compiled = self.compile(schedule)
            refused = self._accept is not None and not self._accept(compiled)
            self._known[schedule] = REFUSED if refused else PeakRange.exactly(peak_of(compiled.memory_analysis()))
        return self._known[schedule]

    def compile(self, schedule: Schedule) -> Any:
        """The compiled program of a schedule, as ``jax.stages.Compiled``."""
        run = emit(self._program, schedule, self._turning_point, self._tie)
        count = len(self._arguments)

        def function(*arrays: Any) -> Any:
            results = run(arrays[:count], arrays[count:])
            return results if self._returned is None else jax.tree.unflatten(self._returned.structure, results)

        captured = tuple(self._program.constants.values())
        shardings = None if self._returned is None else self._returned.shardings
        return compile_quickly(function, (*self._arguments, *captured), self._tie, self._donated, shardings)


@dataclass(frozen=True)
class Returned:
    """Where the results of a function over several devices go.

    Attributes:
        structure: of the results.
        shardings: as ``out_shardings`` of ``jax.jit``.
    """

    structure: Any
    shardings: Any


def compile_quickly(
    function: Any, arguments: Sequence[Any], tie: Tie, donated: Sequence[int] = (), out_shardings: Any = None
) -> Any:
    """Compile a function with no more work than it takes to know its memory; of arrays, only the shapes count."""
    shapes = jax.tree.map(lambda a: a if isinstance(a, jax.ShapeDtypeStruct) else shape_of(a), tuple(arguments))
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    lowered = jax.jit(function, donate_argnums=tuple(donated), **options).lower(*shapes)
    return lowered.compile(compiler_options={**compiler_options(tie), **_quick_options()})


def _quick_options() -> dict[str, Any]:
    """Machine code is made after buffers have been assigned, so its quality does not matter for memory."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, for an array that lies on devices, sharding of a value."""
    aval = jax.typeof(array)
    sharding = array.sharding if isinstance(array, jax.Array) and _is_sharded(array) else None
    make: Any = jax.ShapeDtypeStruct
    weak_type = bool(getattr(aval, "weak_type", False))
    return make(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)  # type: ignore[no-any-return]


def _is_sharded(array: jax.Array) -> bool:
    return not _private.is_traced(array) and isinstance(array.sharding, jax.sharding.NamedSharding)
