"""A function that calls ``shard_map``: where it is one call, its body is planned, with the bytes of one device.

For a plan ``shard_map`` is one operation that cannot be parted. So the body takes the place of the function: its shapes
are those of one device, collectives among its operations run once, as ever, and what is emitted goes back into the same
``shard_map``. What stands around it runs as it is. Several calls, as where each layer is one, are taken apart in place
of that: see ``remat.jax.trace.maps``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr
from remat.jax.emit.evaluate import FlatFunction
from remat.jax.trace import op_facts
from remat.jax.trace.maps import NAME
from remat.jax.trace.program import Equation, Program, program_of


@dataclass(frozen=True)
class MappedFunction:
    """A function around one ``shard_map``.

    Attributes:
        program: the whole function.
        equation: the call of ``shard_map``.
    """

    program: Program
    equation: Equation

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> MappedFunction | None:
        """The function as one around a ``shard_map``; None where it is none, or where there are several."""
        if not holds_a_map(closed.jaxpr):
            return None
        program = program_of(closed)
        found = [one for instruction in program.instructions for one in instruction.equations if _is_mapped(one)]
        if len(found) != 1:
            return None
        around = sum(op_facts.flops(one.eqn) for n in program.instructions for one in n.equations if one not in found)
        inside = sum(map(op_facts.flops, found[0].eqn.params["jaxpr"].eqns))
        # Else what is mapped is a part of the step, such as one kernel.
        return cls(program, found[0]) if around <= inside else None

    @property
    def body(self) -> ClosedJaxpr:
        """What each device runs, of flat arguments."""
        return ClosedJaxpr(self.equation.eqn.params["jaxpr"], [])

    def with_body(self, body: Callable[..., Sequence[Any]]) -> FlatFunction:
        """The whole function, flat, with another body that computes the same."""

        def run(arguments: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
            values: dict[int, Any] = dict(zip(self.program.inputs, arguments, strict=True))
            values.update(zip(self.program.constants, captured, strict=True))
            for equation in (one for instruction in self.program.instructions for one in instruction.equations):
                read = [values[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
                mapped = equation is self.equation
                made = self._mapped(body)(*read) if mapped else _private.evaluate(equation.eqn, read)
                values.update(zip(equation.outputs, made, strict=True))
            return [values[atom] if isinstance(atom, int) else atom.val for atom in self.program.outputs]

        return run

    def traced_with(self, body: Callable[..., Sequence[Any]]) -> ClosedJaxpr:
        """What each device runs, with another body that computes the same and captures no arrays."""
        shapes = [_private.shape_of_aval(self.program.avals[value]) for value in self.program.inputs]
        constants = tuple(self.program.constants.values())
        whole: ClosedJaxpr = jax.make_jaxpr(lambda *arguments: self.with_body(body)(arguments, constants))(*shapes)
        (equation,) = (eqn for eqn in whole.jaxpr.eqns if eqn.primitive.name == NAME)
        return ClosedJaxpr(equation.params["jaxpr"], [])

    def _mapped(self, body: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        params = self.equation.eqn.params
        return jax.shard_map(
            lambda *own: tuple(body(*own)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(_private.manual_axes(self.equation.eqn)),
            check_vma=params["check_vma"],
        )


def holds_a_map(jaxpr: Jaxpr) -> bool:
    """Is there a call of ``shard_map``, at whatever depth?"""
    return any(eqn.primitive.name == NAME or any(map(holds_a_map, op_facts.inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _is_mapped(equation: Equation) -> bool:
    return equation.eqn.primitive.name == NAME
