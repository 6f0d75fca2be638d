"""A jaxpr as a flat list of instructions: calls inlined, equal computations merged, dead ones gone.

Planning works on this list: value ids are the tensor ids of the graph, instruction numbers its op indices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from remat.jax.context import for_a_plan
from remat.jax.trace import op_facts
from remat.jax.trace.fusion import fused, sunk

Atom: TypeAlias = int | Literal
"""A value id, or a scalar that stands in the program itself."""


@dataclass(frozen=True)
class Step:
    """One equation with its values.

    Attributes:
        eqn: the equation, for its primitive and parameters; its variables no longer mean anything.
        inputs: what it reads.
        outputs: ids of the values that it makes.
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Ids of the values read, literals left out."""
        return tuple(atom for atom in self.inputs if isinstance(atom, int))


@dataclass(frozen=True)
class Instruction:
    """Equations that the compiler fuses into one kernel, mostly a single one.

    Attributes:
        steps: in program order.
        reads: ids of the values read from outside.
        outputs: ids of the values that are read outside; the last step makes them.
    """

    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def root(self) -> JaxprEqn:
        """The equation that makes the outputs."""
        return self.steps[-1].eqn


@dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
        instructions: in program order, which is a topological order. A plan repeats whole instructions.
        avals: for each value id, its shape and dtype.
        inputs: ids of the arguments.
        constants: arrays that the function captured, by value id.
        outputs: what it returns.
        shardings: over several devices, where the values lie that a plan makes again; by value id.
    """

    instructions: tuple[Instruction, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    outputs: tuple[Atom, ...]
    shardings: Mapping[int, Any] = field(default_factory=dict)


def program_of(closed: ClosedJaxpr, kept_names: Collection[str] = ()) -> Program:
    """Flatten a closed jaxpr.

    Calls (``jit`` without shardings of its own, ``closed_call``) are inlined. So are regions under ``jax.checkpoint``:
    what their backward part computes again is merged with what the forward part computed, and the plan decides anew.
    Functions with a derivative rule of their own stay one instruction, so that the rule is not lost. Values with one of
    ``kept_names`` are results of instructions, not inside of one.
    """
    flattener = Flattener()
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    steps = alive(flattener.steps, outputs)
    steps = sunk(steps, flattener.avals, (*inputs, *flattener.constants), outputs)
    return program_of_steps(flattener, steps, inputs, outputs, values_named(steps, kept_names))


def program_of_steps(
    flattener: Flattener,
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    kept: Sequence[int] = (),
) -> Program:
    """The program of some of a flattener's steps, fused as the compiler will; ``kept`` values stay between kernels."""
    instructions = tuple(Instruction(*parts) for parts in fused(steps, flattener.avals, (*outputs, *kept)))
    return Program(instructions, tuple(flattener.avals), tuple(inputs), flattener.constants, tuple(outputs))


class Flattener:
    """Writes jaxprs into one flat list of steps; equal computations are merged.

    Attributes:
        avals: for each value id, its shape and dtype.
        steps: in program order.
        constants: arrays that the jaxprs captured, by value id.
    """

    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.steps: list[Step] = []
        self.constants: dict[int, Any] = {}
        self.constant_ids: dict[int, int] = {}
        self.known: dict[Any, tuple[int, ...]] = {}

    def value(self, aval: Any) -> int:
        """A new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(self, closed: ClosedJaxpr, inputs: Sequence[Atom]) -> list[Atom]:
        """Append a jaxpr that is called on values; returns what it computes."""
        scope: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        self._bind_constants(scope, closed.jaxpr, closed.consts)
        return self._walk(closed.jaxpr, scope)

    def _bind_constants(self, scope: dict[Any, Atom], jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        for var, array in zip(jaxpr.constvars, constants, strict=True):
            if id(array) not in self.constant_ids:
                number = self.value(var.aval)
                self.constant_ids[id(array)] = number
                self.constants[number] = array
            scope[var] = self.constant_ids[id(array)]

    def _walk(self, jaxpr: Jaxpr, scope: dict[Any, Atom]) -> list[Atom]:
        def atom(of: Any) -> Atom:
            return of if isinstance(of, Literal) else scope[of]

        for eqn in jaxpr.eqns:
            inputs = tuple(atom(of) for of in eqn.invars)
            inner = _inlined(eqn)
            if inner is not None:
                body, constants = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                inside: dict[Any, Atom] = dict(zip(body.invars, inputs, strict=True))
                self._bind_constants(inside, body, constants)
                outputs: Sequence[Atom] = self._walk(body, inside)
            else:
                outputs = self._add(eqn, inputs)
            scope.update(zip(eqn.outvars, outputs, strict=True))
        return [atom(of) for of in jaxpr.outvars]

    def _add(self, eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        key = _identity(eqn, inputs) if op_facts.may_repeat(eqn) else None
        if key is not None and key in self.known:
            return self.known[key]
        outputs = tuple(self.value(var.aval) for var in eqn.outvars)
        self.steps.append(Step(eqn, inputs, outputs))
        if key is not None:
            self.known[key] = outputs
        return outputs


def _inlined(eqn: JaxprEqn) -> Any:
    """The body of a call that is inlined; None for everything else."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return eqn.params["jaxpr"] if _private.is_plain_call(eqn) else None
    if name in ("closed_call", "core_call", "call"):
        return eqn.params["call_jaxpr"]
    if name in ("remat2", "checkpoint"):
        return eqn.params["jaxpr"]
    return _private.body_of_recomputed_call(eqn)


def _identity(eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> Any:
    """Equal for two equations that compute the same; None where that cannot be told."""
    reads = tuple(
        atom
        if isinstance(atom, int)
        else ("literal", str(atom.aval), repr(atom.val), bool(getattr(atom.aval, "weak_type", 0)))
        for atom in inputs
    )
    context = (str(eqn.ctx.compute_type), str(eqn.ctx.xla_metadata), eqn.ctx.threefry_partitionable)
    key = (eqn.primitive.name, tuple(sorted(eqn.params.items())), reads, context)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def alive(steps: Sequence[Step], outputs: Sequence[Atom]) -> list[Step]:
    """The steps that an output or an effect needs."""
    needed = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for step in reversed(steps):
        if step.eqn.effects or any(value in needed for value in step.outputs):
            kept.append(step)
            needed.update(step.reads)
    return kept[::-1]


def values_named(steps: Sequence[Step], names: Collection[str]) -> list[int]:
    """Ids of the values to which ``jax.ad_checkpoint.checkpoint_name`` gave one of these names."""
    return [step.outputs[0] for step in steps if (name := name_of(step)) is not None and name in names]


def name_of(step: Step) -> str | None:
    """The name that a step gives to its value, which it leaves as it is."""
    return step.eqn.params["name"] if step.eqn.primitive.name == "name" else None


def trace_jaxpr(function: Any, arguments: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``function(*arguments)``, and the structure of what it returns. Nothing runs."""
    with for_a_plan():
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return closed, jax.tree.structure(shapes)
