"""Whether two calls of functions with derivative rules of their own compute the same: compared equation by equation.

JAX traces such a call anew where ``jax.checkpoint`` writes a region again, so the two share no object. A front end that
took them for different ones would think that a region computes other values than the forward part did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.jax import _private
from remat.jax._private import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

RULED = "custom_jvp_call"
"""The primitive of a call with a rule for its forward derivative. A rule for its gradient alone is gone once a gradient
has been taken."""


def is_same_call(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Do two calls of ``RULED`` with the same arguments have the same results and the same derivatives?"""
    return _is_alike(one, other) and _is_same_value(_private.rule_of_call(one), _private.rule_of_call(other))


def _is_alike(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Do two calls compute the same, by rules that stand at one place of the source?

    A rule may call the function that it is for, so that what it calls is compared no deeper than this.
    """
    mine, theirs = (
        {key: value for key, value in eqn.params.items() if key != _private.RULE_OF_A_CALL} for eqn in (one, other)
    )
    return _private.source_of_rule(one) == _private.source_of_rule(other) and _is_same_value(mine, theirs)


def _is_same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, ClosedJaxpr):
        return _is_same_jaxpr(one.jaxpr, other.jaxpr) and _are_identical(one.consts, other.consts)
    if isinstance(one, Jaxpr):
        return _is_same_jaxpr(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same_value, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # Such as two arrays.
        return False


def _are_identical(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


def _is_same_jaxpr(one: Jaxpr, other: Jaxpr) -> bool:
    """Are two jaxprs equal but for the names of their variables?"""
    number: dict[Any, int] = {}
    numbers: dict[Any, int] = {}

    def are_bound(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        for left, right in zip(mine, theirs, strict=True):
            number[left] = numbers[right] = len(number)
        return all(left.aval == right.aval for left, right in zip(mine, theirs, strict=True))

    def is_same_atom(left: Any, right: Any) -> bool:
        if isinstance(left, Literal) or isinstance(right, Literal):
            both = isinstance(left, Literal) and isinstance(right, Literal)
            return both and left.aval == right.aval and repr(left.val) == repr(right.val)
        return number.get(left) == numbers.get(right)

    def are_same_atoms(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        return len(mine) == len(theirs) and all(map(is_same_atom, mine, theirs))

    def is_same_equation(mine: JaxprEqn, theirs: JaxprEqn) -> bool:
        if mine.primitive is not theirs.primitive or len(mine.outvars) != len(theirs.outvars):
            return False
        alike = _is_alike if mine.primitive.name == RULED else lambda a, b: _is_same_value(a.params, b.params)
        return (
            are_same_atoms(mine.invars, theirs.invars)
            and alike(mine, theirs)
            and are_bound(mine.outvars, theirs.outvars)
        )

    given, others = (*one.constvars, *one.invars), (*other.constvars, *other.invars)
    return (
        len(given) == len(others)
        and len(one.eqns) == len(other.eqns)
        and are_bound(given, others)
        and all(map(is_same_equation, one.eqns, other.eqns))
        and are_same_atoms(one.outvars, other.outvars)
    )
