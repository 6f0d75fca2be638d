"""A function as XLA compiles it: the peak of the program that a plan leads to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from remat.core.plan import Plan
from remat.tensorflow import _private
from remat.tensorflow.emit.write import emit
from remat.tensorflow.peak.allocator import AllocatorModel, PeakRange
from remat.tensorflow.peak.xla_memory import program_memory
from remat.tensorflow.trace.func_graph import TracedStep

# What the program around a loop adds to the loop's own block; seen: 0.2 %.
_AROUND_A_LOOP = 0.01


class Program:
    """Compiles copies of a function to see what plans really need.

    Args:
        func_graph: the function; it stays as it is.
        step: its trace.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        allocator: how the device counts.
        carried: for a loop's body, names of the inputs that one iteration hands to the next.
    """

    def __init__(
        self,
        func_graph: _private.FuncGraph,
        step: TracedStep,
        input_shapes: Mapping[str, Sequence[int]],
        allocator: AllocatorModel,
        carried: Collection[str] = (),
    ) -> None:
        self._func_graph = func_graph
        self._step = step
        self._input_shapes = input_shapes
        self._allocator = allocator
        self._carried = carried
        self._known: dict[tuple[int, ...], PeakRange] = {}

    def peak_range(self, plan: Plan | None) -> PeakRange:
        """Peak bytes of the device under a plan, None for the plain step. Compiles, unless the schedule is known."""
        schedule = () if plan is None else plan.schedule
        if schedule not in self._known:

            def change(tensor_named: Callable[[str], tf.Tensor]) -> None:
                if plan is not None:
                    emit(plan, self._step.moved(tensor_named), in_xla=True)

            program = _private.compiled_program(self._func_graph, self._input_shapes, change, self._carried)
            memory = program_memory(program)
            if self._carried:
                memory = memory.in_one_block(_AROUND_A_LOOP)
            self._known[schedule] = self._allocator.program_peak_range(self._step.graph, memory)
        return self._known[schedule]
