"""A jaxpr as a flat list of instructions: what planning works on, and what a plan evaluates.

Calls are inlined, equal computations merged, dead ones dropped. Then two things are done that the compiler will do
later, as far as memory depends on them: cheap values are computed where they are read, and chains of element-wise
equations become one instruction, whose inner values never reach memory. A graph without the second would hold many
tensors that do not exist.

The ids of values are the tensor ids of the graph, the numbers of instructions are its op indices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import PartitionSpec

from remat.core.errors import UnsupportedStep
from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from remat.jax.context import for_a_plan
from remat.jax.trace import maps, op_facts, same_calls
from remat.jax.trace.maps import Map, Mapped

_NEAR: Final = 12
"""An equation joins the kernel that reads it if at most so many equations lie between the two, whatever they make.

Farther apart, it joins only where that keeps no more bytes alive. A judgement, not measured: the compiler itself looks
at no distance. Too large, the graph keeps tensors alive that the compiler frees; too small, it holds tensors that the
compiler fuses away. The compiled peak corrects both, at the price of a round or two.
"""

_REGIONS: Final = ("remat2", "checkpoint")
"""The primitive of ``jax.checkpoint``, by its names in JAX 0.8 to 0.12."""

Atom: TypeAlias = int | Literal
"""A value id, or a scalar that stands in the program itself."""


@dataclass(frozen=True)
class Equation:
    """One equation of a jaxpr, its variables replaced by the ids of values.

    Attributes:
        eqn: as JAX traced it, for its primitive and its parameters. Its own variables no longer mean anything.
        inputs: what it reads.
        outputs: ids of the values that it makes.
        is_backward: did differentiation write it, or a call around it, into a backward part?
        mapped: how it is mapped, where it comes from the body of a ``shard_map`` that was taken apart. ``eqn`` is then
            that of one device, and the values are arrays of all devices.
    """

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    is_backward: bool = False
    mapped: Mapped | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        """Ids of the values read, literals left out."""
        return tuple(atom for atom in self.inputs if isinstance(atom, int))

    @property
    def map(self) -> Map | None:
        """What it is mapped over; None outside of all maps."""
        return None if self.mapped is None else self.mapped.map

    @property
    def devices(self) -> int:
        """How many devices run ``eqn``, each on values of its own."""
        return 1 if self.mapped is None else self.mapped.map.devices


@dataclass(frozen=True)
class Instruction:
    """Equations that the compiler fuses into one kernel; most often one equation alone.

    Attributes:
        equations: in program order.
        reads: ids of the values that come from other instructions, or are given to the program.
        outputs: ids of the values that other instructions read, or that are returned; the last equation makes them.
    """

    equations: tuple[Equation, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def root(self) -> JaxprEqn:
        """The equation that makes the outputs."""
        return self.equations[-1].eqn

    @property
    def is_mapped(self) -> bool:
        """Does its last equation come from the body of a ``shard_map``, which lays its results out?"""
        return self.equations[-1].mapped is not None

    @property
    def is_backward(self) -> bool:
        """Does any of its equations belong to a backward part?"""
        return any(equation.is_backward for equation in self.equations)


@dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
        instructions: in program order, which is a topological order. A plan repeats whole instructions.
        avals: for each value id, its shape and dtype.
        inputs: ids of the arguments.
        constants: arrays that the function captured, by value id.
        outputs: what it returns.
        shardings: by value id, how a value is laid out over several devices; empty on one device.
        regions: what the user's own regions under ``jax.checkpoint`` would compute again: for each region the first
            instruction of its backward part, and the instructions that would run again before it.
    """

    instructions: tuple[Instruction, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    outputs: tuple[Atom, ...]
    shardings: Mapping[int, Any] = field(default_factory=dict)
    regions: tuple[tuple[int, tuple[int, ...]], ...] = ()


def program_of(
    closed: ClosedJaxpr,
    kept_names: Collection[str] = (),
    *,
    keeps_regions: bool = False,
    takes_maps_apart: bool = False,
) -> Program:
    """Flatten a closed jaxpr.

    Calls (``jit`` without shardings of its own, ``closed_call``) are inlined. So are regions under ``jax.checkpoint``:
    what their backward part computes again is merged with what the forward part computed, and the plan decides anew.
    A function with a derivative rule of its own stays one instruction, so that the rule is not lost.

    Args:
        closed: the traced function.
        kept_names: a value to which ``jax.ad_checkpoint.checkpoint_name`` gave one of these names ends its instruction,
            so that a plan can keep it.
        keeps_regions: does what a region under ``jax.checkpoint`` computes again stay one instruction, as JAX runs it?
        takes_maps_apart: do calls of ``shard_map`` become the equations of their bodies? See ``remat.jax.trace.maps``.
    """
    flattener = Flattener(keeps_regions=keeps_regions, takes_maps_apart=takes_maps_apart)
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    equations = alive(flattener.equations, outputs)
    equations = _sunk(equations, flattener.avals, (*inputs, *flattener.constants), outputs)
    return program_of_equations(flattener, equations, inputs, outputs, _values_named(equations, kept_names))


def program_of_equations(
    flattener: Flattener,
    equations: Sequence[Equation],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    kept: Sequence[int] = (),
) -> Program:
    """The program of some of a flattener's equations, fused as the compiler will; ``kept`` values end their kernels."""
    instructions = _fused(equations, flattener.avals, (*outputs, *kept))
    return Program(
        instructions,
        tuple(flattener.avals),
        tuple(inputs),
        flattener.constants,
        tuple(outputs),
        regions=_regions_of(flattener, instructions),
    )


def _regions_of(flattener: Flattener, instructions: Sequence[Instruction]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The user's own regions, their equations replaced by the instructions that these became part of."""
    place = {id(equation): n for n, instruction in enumerate(instructions) for equation in instruction.equations}
    found = []
    for start, stop, merged in flattener.regions:
        own = [place[id(one)] for one in flattener.equations[start:stop] if id(one) in place]
        again = {place[id(flattener.equations[n])] for n in merged if id(flattener.equations[n]) in place}
        if own and (before := tuple(sorted(n for n in again if n < min(own)))):
            found.append((min(own), before))
    return tuple(sorted(found))


class Flattener:
    """Writes jaxprs into one flat list of equations; equal computations are merged.

    Args:
        keeps_regions: as in ``program_of``.
        takes_maps_apart: likewise.

    Attributes:
        avals: for each value id, its shape and dtype.
        equations: in program order.
        constants: arrays that the jaxprs captured, by value id.
        regions: for each region under ``jax.checkpoint`` that computes something again, the stretch of equations that
            it added, and the numbers of the earlier ones that its own were merged with.
    """

    def __init__(self, *, keeps_regions: bool = False, takes_maps_apart: bool = False) -> None:
        self._keeps_regions = keeps_regions
        self._takes_maps_apart = takes_maps_apart
        self._map: Map | None = None  # That of the body under way.
        self._wanted: Mapping[Any, PartitionSpec] = {}  # How results of that body are to be laid out.
        self._specs: dict[int, PartitionSpec] = {}  # How values lie that bodies read or make.
        self.regions: list[tuple[int, int, frozenset[int]]] = []
        self._merged: set[int] | None = None  # In a region: what its equations were merged with so far.
        self._number: dict[tuple[int, ...], int] = {}
        self._is_backward = False  # Inside of a call of a backward part.
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        self.constant_ids: dict[int, int] = {}
        self.known: dict[Any, tuple[int, ...]] = {}
        self._calls: dict[Any, list[JaxprEqn]] = {}  # Those with rules of their own, by what they read.

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
            inner = None if self._keeps_regions and computes_again(eqn) else _inlined(eqn)
            if inner is not None:
                body, constants = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                inside: dict[Any, Atom] = dict(zip(body.invars, inputs, strict=True))
                self._bind_constants(inside, body, constants)
                is_region = eqn.primitive.name in _REGIONS
                around = self._is_backward
                self._is_backward = around or _private.is_transposed(eqn)
                outputs: Sequence[Atom] = (self._walk_region if is_region else self._walk)(body, inside)
                self._is_backward = around
            elif self._takes_maps_apart and maps.can_be_taken_apart(eqn):
                outputs = self._walk_map(eqn, inputs)
            else:
                outputs = self._add(eqn, inputs)
            scope.update(zip(eqn.outvars, outputs, strict=True))
        return [atom(of) for of in jaxpr.outvars]

    def _walk_region(self, jaxpr: Jaxpr, scope: dict[Any, Atom]) -> list[Atom]:
        around, start = self._merged, len(self.equations)
        self._merged = set()
        outputs = self._walk(jaxpr, scope)
        if self._merged:
            self.regions.append((start, len(self.equations), frozenset(self._merged)))
        self._merged = around
        return outputs

    def _walk_map(self, eqn: JaxprEqn, inputs: Sequence[Atom]) -> list[Atom]:
        """Write the body of a ``shard_map``, each equation mapped by itself."""
        of, body = Map.of(eqn), eqn.params["jaxpr"]
        around, self._is_backward = self._is_backward, self._is_backward or _private.is_transposed(eqn)
        read = [self._laid_out(atom, of, spec) for atom, spec in zip(inputs, eqn.params["in_specs"], strict=True)]
        returned = list(zip(body.outvars, eqn.params["out_specs"], strict=True))
        self._wanted = {var: spec for var, spec in returned if isinstance(var, Var) and of.keeps(var.aval, spec)}
        self._map = of
        made = self._walk(body, dict(zip(body.invars, read, strict=True)))
        outputs = [self._returned(atom, var, spec) for atom, (var, spec) in zip(made, returned, strict=True)]
        self._map, self._wanted, self._is_backward = None, {}, around
        return outputs

    def _laid_out(self, atom: Atom, of: Map, spec: PartitionSpec) -> Atom:
        """A value as a body reads it."""
        if not isinstance(atom, int):
            return atom
        if not maps.same_layout(self._specs.setdefault(atom, spec), spec):
            (atom,) = self._add(maps.laid_out(self.avals[atom], of, spec), (atom,))
            self._specs[atom] = spec
        return atom

    def _returned(self, atom: Atom, var: Any, spec: PartitionSpec) -> Atom:
        """A value of the body under way as the call returns it."""
        if not isinstance(atom, int) or maps.same_layout(self._specs[atom], spec):
            return atom
        self._wanted = {var: spec}
        (atom,) = self._add(maps.identity(var.aval, spec).replace(outvars=[var]), (atom,))
        return atom

    def _add(self, eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        key = self._identity(eqn, inputs) if op_facts.may_repeat(eqn) else None
        if key is not None and self._map is not None:
            key = key, self._map
        if key is not None and key in self.known:
            if self._merged is not None and self.known[key] in self._number:
                self._merged.add(self._number[self.known[key]])
            return self.known[key]
        outputs, mapped = self._outputs_of(eqn, inputs)
        is_backward = self._is_backward or _private.is_transposed(eqn)
        self.equations.append(Equation(eqn, inputs, outputs, is_backward, mapped))
        if key is not None:
            self.known[key] = outputs
            self._number[outputs] = len(self.equations) - 1
        return outputs

    def _outputs_of(self, eqn: JaxprEqn, inputs: Sequence[Atom]) -> tuple[tuple[int, ...], Mapped | None]:
        of = self._map
        if of is None:
            return tuple(self.value(var.aval) for var in eqn.outvars), None
        specs = tuple(self._wanted.get(var) or of.own_spec(var.aval) for var in eqn.outvars)
        outputs = tuple(self.value(of.whole(var.aval, spec)) for var, spec in zip(eqn.outvars, specs, strict=True))
        self._specs.update(zip(outputs, specs, strict=True))
        return outputs, Mapped(of, tuple(self._specs[atom] for atom in inputs if isinstance(atom, int)), specs)

    def _identity(self, eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> Any:
        """Equal for two equations that compute the same; None where that cannot be told."""
        if eqn.primitive.name != same_calls.RULED:
            return _identity(eqn, inputs)
        calls = self._calls.setdefault((len(eqn.outvars), _names_of(inputs)), [])
        same = next((call for call in calls if same_calls.is_same_call(call, eqn)), None)
        if same is None:
            calls.append(eqn)
        return same_calls.RULED, id(same or eqn), _names_of(inputs)


def computes_again(eqn: JaxprEqn) -> bool:
    """Is this the backward part of a region under ``jax.checkpoint``, which the compiler is not to merge?"""
    is_region = eqn.primitive.name in _REGIONS
    return is_region and bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


def has_regions(jaxpr: Jaxpr) -> bool:
    """Does ``computes_again`` hold for an equation of a program, calls inlined?"""
    for eqn in jaxpr.eqns:
        inner = _inlined(eqn)
        if computes_again(eqn) or (
            inner is not None and has_regions(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
        ):
            return True
    return False


def _inlined(eqn: JaxprEqn) -> Any:
    """The body of a call that is inlined; None for everything else."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return eqn.params["jaxpr"] if _private.is_plain_call(eqn) else None
    if name in ("closed_call", "core_call", "call"):
        return eqn.params["call_jaxpr"]
    if name in _REGIONS:
        return eqn.params["jaxpr"]
    return _private.body_of_recomputed_call(eqn)


def _identity(eqn: JaxprEqn, inputs: tuple[Atom, ...]) -> Any:
    """Equal for two equations that compute the same; None where that cannot be told."""
    context = (str(eqn.ctx.compute_type), str(eqn.ctx.xla_metadata), eqn.ctx.threefry_partitionable)
    key = (eqn.primitive.name, tuple(sorted(eqn.params.items())), _names_of(inputs), context)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _names_of(inputs: tuple[Atom, ...]) -> tuple[Any, ...]:
    """What equations read, so that it can be compared."""
    return tuple(
        atom
        if isinstance(atom, int)
        else ("literal", str(atom.aval), repr(atom.val), bool(getattr(atom.aval, "weak_type", 0)))
        for atom in inputs
    )


def alive(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
    """The equations that an output or an effect needs."""
    needed = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for equation in reversed(equations):
        if equation.eqn.effects or any(value in needed for value in equation.outputs):
            kept.append(equation)
            needed.update(equation.reads)
    return kept[::-1]


def _sunk(
    equations: Sequence[Equation], avals: Sequence[Any], pinned: Sequence[int], outputs: Sequence[Atom]
) -> list[Equation]:
    """Program order, with cheap equations moved down to where they are first read.

    Differentiation writes what only the backward part reads (``3 * x**2``) into the forward part. An equation moves
    where that keeps no more bytes alive: its inputs are read later anyway, or are no larger than what it makes.
    """
    count = len(equations)
    end = count + 1
    first_read = {value: end for equation in equations for value in equation.outputs}
    last_read = dict.fromkeys(pinned, end)
    place = [(number, 0) for number in range(count)]
    for atom in outputs:
        if isinstance(atom, int):
            first_read[atom] = last_read[atom] = end
    for number in reversed(range(count)):
        equation = equations[number]
        at = number
        reads = dict.fromkeys(equation.reads)
        if op_facts.may_sink(equation.eqn) and equation.outputs:
            target = min(first_read[value] for value in equation.outputs)
            made = sum(op_facts.size_bytes(avals[value]) for value in equation.outputs)
            extended = sum(op_facts.size_bytes(avals[v]) for v in reads if last_read.get(v, -1) < target)
            if at < target < end and extended <= made:
                at = target
                place[number] = (target, -1)
        for value in reads:
            first_read[value] = min(first_read.get(value, end), at)
            last_read[value] = max(last_read.get(value, -1), at)
    return [equations[number] for number in sorted(range(count), key=lambda number: (place[number], number))]


def _fused(equations: Sequence[Equation], avals: Sequence[Any], outputs: Sequence[Atom]) -> tuple[Instruction, ...]:
    """Group equations into kernels, in a topological order.

    An element-wise equation joins the kernel that alone reads it, unless that is far away and the inputs of the
    equation would have to live longer for it. Such a merge cannot close a cycle: all that the equation makes goes into
    that kernel.
    """
    returned = {atom for atom in outputs if isinstance(atom, int)}
    readers: dict[int, set[int]] = {}
    last_read: dict[int, int] = {}
    for number, equation in enumerate(equations):
        for value in equation.reads:
            readers.setdefault(value, set()).add(number)
            last_read[value] = number
    root = list(range(len(equations)))
    for number in reversed(range(len(equations))):
        equation = equations[number]
        if not op_facts.may_join(equation.eqn) or any(value in returned for value in equation.outputs):
            continue
        into = {root[reader] for value in equation.outputs for reader in readers.get(value, ())}
        if len(into) != 1:
            continue
        (target,) = into
        if not op_facts.takes_producers(equations[target].eqn):
            continue
        extended = sum(op_facts.size_bytes(avals[v]) for v in dict.fromkeys(equation.reads) if last_read[v] < target)
        made = sum(op_facts.size_bytes(avals[v]) for v in equation.outputs)
        if target - number > _NEAR and extended > made:
            continue
        root[number] = target
        for value in equation.reads:
            last_read[value] = max(last_read[value], target)
    groups: dict[int, list[Equation]] = {}
    for number, equation in enumerate(equations):
        groups.setdefault(root[number], []).append(equation)
    result = []
    for target in sorted(groups):
        group = tuple(groups[target])
        inside = {value for equation in group for value in equation.outputs}
        reads = dict.fromkeys(value for equation in group for value in equation.reads if value not in inside)
        result.append(Instruction(group, tuple(reads), equations[target].outputs))
    return tuple(result)


def _values_named(equations: Sequence[Equation], names: Collection[str]) -> list[int]:
    """Ids of the values to which ``jax.ad_checkpoint.checkpoint_name`` gave one of these names."""
    return [equation.outputs[0] for equation in equations if (name := name_of(equation)) is not None and name in names]


def name_of(equation: Equation) -> str | None:
    """The name that an equation gives to its value, which it leaves as it is."""
    return equation.eqn.params["name"] if equation.eqn.primitive.name == "name" else None


@contextlib.contextmanager
def telling_of_cudnn() -> Iterator[None]:
    """Inside, an operation that only a GPU can trace raises an error that says what to write.

    Raises:
        UnsupportedStep: in place of JAX's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if "cuDNN is not detected" not in str(error):
            raise
        raise UnsupportedStep(
            "jax.nn.dot_product_attention(implementation='cudnn') can be traced only where a GPU with cuDNN is: plan "
            "there, or leave implementation out, which counts the products of attention that cuDNN never keeps"
        ) from error


def trace_jaxpr(function: Any, arguments: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``function(*arguments)``, and the structure of what it returns. Nothing runs.

    Raises:
        UnsupportedStep: where a policy of ``jax.checkpoint`` offloads values, which a plan would undo, and for cuDNN's
            attention without a GPU.
    """
    with for_a_plan(), telling_of_cudnn():
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    offloaded = op_facts.offloaded_values(closed.jaxpr)
    if offloaded:
        raise UnsupportedStep(
            f"a policy of jax.checkpoint offloads {', '.join(offloaded)} to the host, which a plan cannot do: take the "
            "policy away and let the plan decide, or leave the budget out and compile with jax.jit"
        )
    return closed, jax.tree.structure(shapes)
