"""Calls of ``shard_map`` taken apart: each equation of a body becomes one that is mapped by itself.

What crosses from one equation to the next is an array of all devices, of which each has its own part, as it is with the
residuals that JAX passes from a call to its backward part. So a plan may keep, drop and make again any value inside of
any of the calls. The compiler puts the equations side by side as if they had never been apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from remat.jax import _private
from remat.jax._private import Jaxpr, JaxprEqn, Literal
from remat.jax.trace import op_facts

NAME: Final = "shard_map"
"""The primitive of ``jax.shard_map``."""


@dataclass(frozen=True)
class Map:
    """What the equations of one body have in common.

    Attributes:
        mesh: of devices.
        axes: those axes of the mesh that the body is mapped over.
        check_vma: as in ``jax.shard_map``: does JAX track over which axes a value differs?
    """

    mesh: Any
    axes: frozenset[str]
    check_vma: bool

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Map:
        """The map of a call."""
        return cls(eqn.params["mesh"], _private.manual_axes(eqn), bool(eqn.params["check_vma"]))

    @property
    def devices(self) -> int:
        """Over how many devices, or groups of them, the body is mapped."""
        return self._count(self.axes)

    @property
    def is_over_all_devices(self) -> bool:
        """Does the body say of each device what it does, so that nothing is left to the compiler?"""
        return self.devices == self._count(frozenset(self.mesh.axis_names))

    def own_spec(self, aval: Any) -> PartitionSpec:
        """How an array of all devices holds a value of the body: each device's part along the first axis."""
        varying = _private.varying_axes(aval) if self.check_vma else self.axes
        names = tuple(name for name in self.mesh.axis_names if name in varying)
        spec: Any = PartitionSpec
        own: PartitionSpec = spec(names) if names else spec()
        return own

    def keeps(self, aval: Any, spec: PartitionSpec) -> bool:
        """Does an array of all devices, laid out so, hold all that there is of a value of the body?"""
        return not self.check_vma or _names_in(spec) == _private.varying_axes(aval)

    def whole(self, aval: Any, spec: PartitionSpec) -> Any:
        """The array of all devices whose parts, laid out so, are the values of the body."""
        shape = list(aval.shape)
        for axis, names in enumerate(spec):
            count = self._count(_names_in((names,)))
            if axis == len(shape):
                shape.append(1)  # A number has no axis to lie along.
            shape[axis] *= count
        return jax.core.ShapedArray(tuple(shape), aval.dtype)

    def _count(self, names: frozenset[str]) -> int:
        return math.prod(int(self.mesh.shape[name]) for name in names)


@dataclass(frozen=True)
class Mapped:
    """How one equation of a body is mapped by itself.

    Attributes:
        map: what it has in common with the others.
        in_specs: how the arrays that it reads are laid out; literals are left out.
        out_specs: how those that it makes are.
    """

    map: Map
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]


def can_be_taken_apart(eqn: JaxprEqn) -> bool:
    """Is this a call of ``shard_map`` whose values can all be held by arrays of all devices?"""
    return eqn.primitive.name == NAME and not _private.other_effects(eqn) and _is_plain(eqn.params["jaxpr"])


def hold_maps_in_maps(jaxpr: Jaxpr, *, inside: bool = False) -> bool:
    """Is there a call of ``shard_map`` inside of another one?"""
    return any(
        (inside and eqn.primitive.name == NAME)
        or any(
            hold_maps_in_maps(inner, inside=inside or eqn.primitive.name == NAME)
            for inner in op_facts.inner_jaxprs(eqn)
        )
        for eqn in jaxpr.eqns
    )


def same_layout(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Do two specs lay an array out alike?"""
    return _plain(one) == _plain(other)


def _is_plain(body: Jaxpr) -> bool:
    """No map inside of the map, no sums that are still to be made, and no values without a shape."""
    return not body.constvars and all(
        eqn.primitive.name != NAME
        and not _private.other_effects(eqn)
        and all(map(_is_array, (*eqn.invars, *eqn.outvars)))
        for eqn in body.eqns
    )


def _is_array(var: Any) -> bool:
    if isinstance(var, Literal):
        return True
    return hasattr(var.aval, "shape") and not _private.pending_axes(var.aval)


def _plain(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    axes = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)


def _names_in(spec: Any) -> frozenset[str]:
    return frozenset(name for names in _plain(spec) for name in names)


def identity(aval: Any, spec: PartitionSpec) -> JaxprEqn:
    """An equation that leaves a value of a body as it is, and returns it laid out in some way."""
    named: Any = checkpoint_name
    return _equation(lambda value: named(value, f"{NAME}, {spec}"), aval)


def laid_out(aval: Any, of: Map, spec: PartitionSpec) -> JaxprEqn:
    """An equation, outside of any body, that lays an array out in another way."""
    sharding = NamedSharding(of.mesh, spec)
    constrained: Any = jax.lax.with_sharding_constraint
    return _equation(lambda value: constrained(value, sharding), aval)


def _equation(function: Callable[[Any], Any], aval: Any) -> JaxprEqn:
    shape: Any = jax.ShapeDtypeStruct
    made: JaxprEqn = jax.make_jaxpr(function)(shape(aval.shape, aval.dtype)).jaxpr.eqns[0]
    return made
