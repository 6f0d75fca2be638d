"""A step of many equal blocks, made of traces with few of them.

A decoder of 80 layers is traced with 2, 3, 4 and 5 layers. What each further layer adds to the graph is the same: some
ops in the forward pass, some in the backward pass, some entries in the lists of ops that handle all parameters at once.
Every number in the graph (the tensor that an op reads, a size, a time) is then an affine function of the position of
the layer and of the number of layers. ``repeated`` finds these functions in three traces, proves them on the fourth,
and evaluates them for the number of layers that is asked for. Where a single number does not follow, it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, TypeVar

from remat.core.graph import Graph, Op, Tensor

T = TypeVar("T")
_At: TypeAlias = tuple[int, int]  # The number of a copy, and how many copies there are.
_Function: TypeAlias = Callable[[int, int], T]

TRACES: Final = 4
"""How many traces ``repeated`` takes: three fix the functions, and the fourth can contradict them."""

_NUMBER: Final = re.compile(r"\d+")
_TIME_TOLERANCE: Final = 1e-6
"""By how much, relative to itself, a predicted time may miss an affine function. Times are sums of roofline terms in
floating point; a larger miss means that the op is bound by something else in a longer step."""


class NotRepeated(Exception):
    """The traces do not grow by equal parts; the message names the first thing that does not."""


def repeated(traces: Sequence[Graph], copies: int) -> Graph:
    """The graph of a step with many equal parts.

    Args:
        traces: of the step with no, one, two and three parts more than the shortest one has; see ``TRACES``.
        copies: how many parts more than the shortest trace the result has.

    Raises:
        NotRepeated: where the traces do not grow by equal parts.
    """
    if len(traces) != TRACES:
        raise ValueError(f"{len(traces)} traces were given; {TRACES} are needed")
    ops = _grown([g.ops for g in traces], lambda m, op: _op_signature(traces[m], op), _op_function(traces), "op")
    tensors = _grown([g.tensors for g in traces], lambda m, t: _tensor_signature(t), _tensor_function, "tensor")
    lists = [
        _grown([list(getattr(g, name)) for g in traces], _signature_in(traces), _integer, f"{name} of the graph")
        for name in ("inputs", "outputs")
    ]
    return Graph(
        tuple(ops(copies)),
        tuple(tensors(copies)),
        tuple(lists[0](copies)),
        tuple(lists[1](copies)),
        traces[-1].free_order,
        traces[-1].notes,
    )


@dataclass(frozen=True)
class _Insertion:
    """Where a longer sequence holds something that a shorter one does not.

    Attributes:
        at: index in the shorter sequence before which it stands.
        length: how many entries it has.
    """

    at: int
    length: int


def _insertions(short: Sequence[Hashable], long: Sequence[Hashable], what: str) -> list[_Insertion]:
    """The stretches of ``long`` that are missing in ``short``, each as far back as it can be."""
    found: list[_Insertion] = []
    i = j = 0
    missing = len(long) - len(short)
    while True:
        equal = _equal_from(short, i, long, j)
        i, j = i + equal, j + equal
        if missing < 0:
            raise NotRepeated(f"a longer step has fewer entries ({what})")
        if i == len(short):
            if missing:
                found.append(_Insertion(i, missing))
            return found
        if not missing:
            raise NotRepeated(f"two steps differ at {what} {i}: {short[i]!r} in one, {long[j]!r} in the other")
        length = max(range(1, missing + 1), key=lambda n: (_equal_from(short, i, long, j + n), -n))
        found.append(_Insertion(i, length))
        j += length
        missing -= length


def _equal_from(a: Sequence[Hashable], i: int, b: Sequence[Hashable], j: int) -> int:
    """How many entries are equal from here on."""
    most = min(len(a) - i, len(b) - j)
    return next((n for n in range(most) if a[i + n] != b[j + n]), most)


_Label: TypeAlias = tuple[
    int, int
]  # Of an inserted entry: its insertion and its place there; of any other: (-1, index).


def _labels(size: int, insertions: Sequence[_Insertion], copies: int) -> list[tuple[_Label, int]]:
    """For each entry of a sequence with some copies of what is inserted: its label, and the number of the copy."""
    found: list[tuple[_Label, int]] = []
    done = 0
    for number, one in enumerate(insertions):
        found += [((-1, index), 0) for index in range(done, one.at)]
        found += [((number, place), copy) for copy in range(copies) for place in range(one.length)]
        done = one.at
    return found + [((-1, index), 0) for index in range(done, size)]


def _grown(
    sequences: Sequence[Sequence[T]],
    signature: Callable[[int, T], Hashable],
    function: Callable[[Mapping[_At, T], str], _Function[T]],
    what: str,
) -> Callable[[int], list[T]]:
    """A sequence as a function of the number of copies.

    Args:
        sequences: with 0, 1, 2 and 3 copies.
        signature: what two entries have in common that stand for the same; given the number of copies, and the entry.
        function: an entry's function of copy and number of copies, from what it is in the sequences.
        what: what an entry is, for errors.
    """
    signatures = [[signature(m, one) for one in sequence] for m, sequence in enumerate(sequences)]
    insertions = _insertions(signatures[0], signatures[1], what)
    size = len(sequences[0])
    seen: dict[_Label, dict[_At, T]] = {}
    expected: dict[_Label, Hashable] = {}
    for m, sequence in enumerate(sequences):
        labels = _labels(size, insertions, m)
        if len(labels) != len(sequence):
            raise NotRepeated(f"step {m} has {len(sequence)} entries of {what}, where {len(labels)} were expected")
        for (label, copy), one, own in zip(labels, sequence, signatures[m], strict=True):
            if expected.setdefault(label, own) != own:
                raise NotRepeated(f"{what}: {own!r} stands where {expected[label]!r} was expected")
            seen.setdefault(label, {})[copy, m] = one
    functions = {label: function(values, f"{what} {label}") for label, values in seen.items()}
    return lambda copies: [functions[label](copy, copies) for label, copy in _labels(size, insertions, copies)]


def _integer(seen: Mapping[_At, int], what: str) -> _Function[int]:
    """An integer as an affine function of the copy and of the number of copies."""
    alpha, beta, gamma = _coefficients(seen)
    if any(value != alpha + beta * k + gamma * m for (k, m), value in seen.items()):
        raise NotRepeated(f"{what} does not grow evenly: {dict(seen)}")
    return lambda k, m: alpha + beta * k + gamma * m


def _coefficients(seen: Mapping[_At, Any]) -> tuple[Any, Any, Any]:
    first = min(m for _, m in seen)
    gamma = seen[0, first + 1] - seen[0, first]
    beta = seen[1, 2] - seen[0, 2] if (1, 2) in seen else 0
    return seen[0, first] - gamma * first, beta, gamma


def _seconds(seen: Mapping[_At, float], what: str) -> _Function[float]:
    values = list(seen.values())
    if all(value == values[0] for value in values):
        return lambda k, m: values[0]
    alpha, beta, gamma = _coefficients(seen)
    for (k, m), value in seen.items():
        if not math.isclose(value, alpha + beta * k + gamma * m, rel_tol=_TIME_TOLERANCE):
            raise NotRepeated(f"the time of {what} does not grow evenly: {dict(seen)}")
    return lambda k, m: max(0.0, alpha + beta * k + gamma * m)


def _text(seen: Mapping[_At, str], what: str) -> _Function[str]:
    """A text whose numbers are functions; texts are for people, so one that does not follow stays as it was."""
    values = list(seen.values())
    if all(value == values[0] for value in values):
        return lambda k, m: values[0]
    skeleton = _NUMBER.sub("{}", values[0].replace("{", "{{").replace("}", "}}"))
    numbers = {at: [int(n) for n in _NUMBER.findall(value)] for at, value in seen.items()}
    try:
        functions = [
            _integer({at: of[place] for at, of in numbers.items()}, what) for place in range(skeleton.count("{}"))
        ]
    except (NotRepeated, IndexError):
        return lambda k, m: values[0]
    return lambda k, m: skeleton.format(*[function(k, m) for function in functions])


def _integers(signature: Callable[[int, int], Hashable]) -> Callable[[Mapping[_At, tuple[int, ...]], str], Any]:
    """Functions of tuples of tensors' ids. In a stretch of their own they may grow with the number of copies."""

    def function(seen: Mapping[_At, tuple[int, ...]], what: str) -> _Function[tuple[int, ...]]:
        lengths = {len(value) for value in seen.values()}
        if len(lengths) == 1:
            entries = [
                _integer({at: value[place] for at, value in seen.items()}, what) for place in range(lengths.pop())
            ]
            return lambda k, m: tuple(entry(k, m) for entry in entries)
        if set(seen) != {(0, m) for m in range(TRACES)}:
            raise NotRepeated(f"{what} has lists of several lengths")
        grown = _grown([list(seen[0, m]) for m in range(TRACES)], signature, _integer, what)
        return lambda k, m: tuple(grown(m))

    return function


def _signature_in(traces: Sequence[Graph]) -> Callable[[int, int], Hashable]:
    return lambda m, tensor: _tensor_signature(traces[m].tensors[tensor])


def _tensor_signature(tensor: Tensor) -> Hashable:
    return (_NUMBER.sub("#", tensor.name), tensor.dtype, tensor.role, tensor.alias_of is None, tensor.shape)


def _op_signature(graph: Graph, op: Op) -> Hashable:
    # An op of the update may handle the parameters of all parts at once, so that it makes more in a longer step.
    sizes = () if op.phase == "update" else tuple(graph.tensors[tensor].size_bytes for tensor in op.outputs)
    return (_NUMBER.sub("#", op.name), op.kind, op.phase, op.recomputable, sizes)


def _tensor_function(seen: Mapping[_At, Tensor], what: str) -> _Function[Tensor]:
    def of(name: str, fit: Callable[[Any, str], _Function[Any]]) -> _Function[Any]:
        return fit({at: getattr(tensor, name) for at, tensor in seen.items()}, what)

    some = next(iter(seen.values()))
    size, name = of("size_bytes", _integer), of("name", _text)
    alias = None if some.alias_of is None else of("alias_of", _integer)
    return lambda k, m: Tensor(
        size(k, m), name(k, m), some.shape, some.dtype, None if alias is None else alias(k, m), some.role
    )


def _op_function(traces: Sequence[Graph]) -> Callable[[Mapping[_At, Op], str], _Function[Op]]:
    tensors = _integers(_signature_in(traces))
    fits: dict[str, Callable[[Any, str], _Function[Any]]] = {
        "name": _text,
        "layer": _text,
        "inputs": tensors,
        "outputs": tensors,
        "time_s": _seconds,
        "workspace_bytes": _integer,
    }

    def function(seen: Mapping[_At, Op], what: str) -> _Function[Op]:
        some = next(iter(seen.values()))
        if some.after or some.in_place:
            raise NotRepeated(f"{what} ({some.name}) has edges beside its tensors")
        what = f"{what} ({some.name})"
        made = {name: fit({at: getattr(op, name) for at, op in seen.items()}, what) for name, fit in fits.items()}
        same = {one.name: getattr(some, one.name) for one in fields(Op) if one.name not in made}
        return lambda k, m: Op(**same, **{name: of(k, m) for name, of in made.items()})

    return function
