"""Hand-computed cases of the memory model: a graph, a schedule, and the bytes of every step.

Each is worked out on paper from the rules in ``remat.core.schedule``; sizes are powers of two or distinct, so that a
sum tells which storages were counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat import Graph, Op, Tensor


@dataclass(frozen=True)
class Case:
    graph: Graph
    schedule: tuple[int, ...]
    bytes: tuple[int, ...]


def _graph(
    sizes: list[int | tuple[int, int]],
    ops: list[Op],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> Graph:
    """Tensors from sizes; a pair (size, base) is a view."""
    tensors = tuple(Tensor(s) if isinstance(s, int) else Tensor(s[0], alias_of=s[1]) for s in sizes)
    return Graph(tuple(ops), tensors, inputs, outputs)


def _makes(*outputs: int) -> Op:
    return Op(outputs=outputs)


def _reads(*inputs: int) -> Op:
    return Op(inputs=inputs)


def _maps(inputs: tuple[int, ...], outputs: tuple[int, ...], in_place: tuple[tuple[int, int], ...] = ()) -> Op:
    return Op(inputs=inputs, outputs=outputs, in_place=in_place)


CASES: dict[str, Case] = {
    "empty graph": Case(_graph([16], [], inputs=(0,)), (), ()),
    "one op, output to the end": Case(_graph([4], [_makes(0)], outputs=(0,)), (0,), (4,)),
    "one op that makes nothing": Case(_graph([], [Op(workspace_bytes=7)]), (0,), (7,)),
    "an output nobody reads is freed after its step": Case(
        _graph([1, 2, 4], [_makes(0, 1), _maps((0,), (2,))]), (0, 1), (1 + 2, 1 + 4)
    ),
    "a tensor dies after its last read": Case(
        _graph([1, 2, 4], [_makes(0), _maps((0,), (1,)), _maps((1,), (2,))]), (0, 1, 2), (1, 1 + 2, 2 + 4)
    ),
    "workspace counts during its op only": Case(
        _graph([1, 2], [_makes(0), Op(inputs=(0,), workspace_bytes=64), _maps((0,), (1,))]),
        (0, 1, 2),
        (1, 1 + 64, 1 + 2),
    ),
    "graph outputs live to the end": Case(
        _graph([1, 2, 4], [_makes(0), _makes(1), _makes(2)], outputs=(0,)), (0, 1, 2), (1, 1 + 2, 1 + 4)
    ),
    "pinned inputs count always, once": Case(
        _graph([16, 1, 2], [_maps((0,), (1,)), _maps((0, 1), (2,))], inputs=(0,)), (0, 1), (16 + 1, 16 + 1 + 2)
    ),
    "pinned inputs that share storage count once": Case(
        _graph([16, (16, 0), 1], [_maps((0, 1), (2,))], inputs=(0, 1)), (0,), (16 + 1,)
    ),
    "a view of a pinned storage adds nothing, even as an output": Case(
        _graph([16, (16, 0), 1], [_maps((0,), (1,)), _maps((1,), (2,))], inputs=(0,), outputs=(1,)),
        (0, 1),
        (16, 16 + 1),
    ),
    "a pinned tensor as an output adds nothing": Case(
        _graph([16, 1], [_makes(1)], inputs=(0,), outputs=(0,)), (0,), (16 + 1,)
    ),
    "recomputation lets the first instance die early": Case(
        # op0 makes a, op1 reads it, op2 makes 8 bytes, op0 again, op3 reads the new a.
        _graph([1, 2, 8], [_makes(0), _maps((0,), (1,)), _makes(2), _reads(0)]),
        (0, 1, 2, 0, 3),
        (1, 1 + 2, 8, 1, 1),
    ),
    "without recomputation it stays": Case(
        _graph([1, 2, 8], [_makes(0), _maps((0,), (1,)), _makes(2), _reads(0)]), (0, 1, 2, 3), (1, 1 + 2, 1 + 8, 1)
    ),
    "a rerun's other outputs are made again and freed at once": Case(
        _graph([1, 2], [_makes(0, 1), _reads(0, 1), _reads(0)]), (0, 1, 0, 2), (1 + 2, 1 + 2, 1 + 2, 1)
    ),
    "the newest instance of a recomputed output is the one kept": Case(
        # The first instance dies after its last read (step 1), the second lives to the end.
        _graph([1, 8], [_makes(0), _reads(0), _makes(1)], outputs=(0,)),
        (0, 1, 2, 0, 2),
        (1, 1, 8, 1, 1 + 8),
    ),
    "a view keeps its storage alive": Case(
        _graph([4, (4, 0), 1, 2], [_makes(0), _maps((0,), (1,)), _makes(2), _maps((1,), (3,))]),
        (0, 1, 2, 3),
        (4, 4, 4 + 1, 4 + 2),
    ),
    "a view nobody reads keeps nothing": Case(
        _graph([4, (4, 0), 1], [_makes(0), _maps((0,), (1,)), _makes(2)]), (0, 1, 2), (4, 4, 1)
    ),
    "a view as an output keeps its storage to the end": Case(
        _graph([4, (2, 0), 1], [_makes(0), _maps((0,), (1,)), _makes(2)], outputs=(1,)), (0, 1, 2), (4, 4, 4 + 1)
    ),
    "an old view keeps the old storage alive beside the recomputed root": Case(
        # op0 makes root 0, op1 its view 1; op0 again makes a second storage while view 1 still holds the first.
        _graph([4, (4, 0)], [_makes(0), _maps((0,), (1,)), _reads(0, 1)]),
        (0, 1, 0, 2),
        (4, 4, 4 + 4, 4 + 4),
    ),
    "a recomputed view moves to the recomputed root": Case(
        _graph([4, (4, 0), 1], [_makes(0), _maps((0,), (1,)), _makes(2), _reads(1)]),
        (0, 1, 2, 0, 1, 3),
        (4, 4, 1, 4, 4, 4),
    ),
    "a view of a view binds to the storage that was read": Case(
        # View 2 is made from view 1 of the old storage after the root was recomputed: the old storage lives on.
        _graph([4, (4, 0), (4, 1), 1], [_makes(0), _maps((0,), (1,)), _maps((1,), (2,)), _makes(3), _reads(2)]),
        (0, 1, 0, 2, 3, 4),
        (4, 4, 4 + 4, 4, 4 + 1, 4),
    ),
    "a view binds to its own base where the op reads several of the family": Case(
        # op2 reads the recomputed root and the old view 1, and makes view 2 of view 1: the old storage lives on.
        _graph([4, (4, 0), (4, 1), 1], [_makes(0), _maps((0,), (1,)), _maps((0, 1), (2,)), _makes(3), _reads(2, 0)]),
        (0, 1, 0, 2, 3, 4),
        (4, 4, 4 + 4, 4 + 4, 4 + 4 + 1, 4 + 4),
    ),
    "root and view made by one run share its storage": Case(
        _graph([4, (4, 0), 1], [_makes(0, 1), _makes(2), _reads(1)]), (0, 1, 2), (4, 4 + 1, 4)
    ),
    "in place: the larger of the two is charged": Case(
        _graph([8, 8, 4, 16], [_makes(0), *(_maps((t,), (t + 1,), ((t, t + 1),)) for t in range(3))]),
        (0, 1, 2, 3),
        (8, 8, 8, 16),
    ),
    "in place: not while the source is read later": Case(
        _graph([8, 8], [_makes(0), _maps((0,), (1,), ((0, 1),)), _reads(0)]), (0, 1, 2), (8, 8 + 8, 8)
    ),
    "in place: not while a view of the source is read later": Case(
        _graph([8, (8, 0), 8], [_makes(0), _maps((0,), (1,)), _maps((0,), (2,), ((0, 2),)), _reads(1)]),
        (0, 1, 2, 3),
        (8, 8, 8 + 8, 8),
    ),
    "in place: through a view of the source": Case(
        _graph([8, (8, 0), 8], [_makes(0), _maps((0,), (1,)), _maps((1,), (2,), ((1, 2),))]), (0, 1, 2), (8, 8, 8)
    ),
    "in place: not from a pinned source": Case(
        _graph([8, 8], [_maps((0,), (1,), ((0, 1),))], inputs=(0,)), (0,), (8 + 8,)
    ),
    "in place: a pinned source leaves the output to the next one": Case(
        _graph([16, 8, 8], [_makes(1), _maps((0, 1), (2,), ((0, 2), (1, 2)))], inputs=(0,)), (0, 1), (16 + 8, 16 + 8)
    ),
    "in place: not from a graph output": Case(
        _graph([8, 8], [_makes(0), _maps((0,), (1,), ((0, 1),))], outputs=(0,)), (0, 1), (8, 8 + 8)
    ),
    "in place: not into a view": Case(
        _graph([8, (8, 0)], [_makes(0), _maps((0,), (1,), ((0, 1),)), _reads(1)]), (0, 1, 2), (8, 8, 8)
    ),
    "in place: one output for each source, one source for each output": Case(
        # Pairs (0,2), (0,3), (1,2): the first serves, the others are spent; 1 is still free but 2 is taken.
        _graph([8, 4, 8, 8], [_makes(0, 1), _maps((0, 1), (2, 3), ((0, 2), (0, 3), (1, 2)))]),
        (0, 1),
        (8 + 4, 8 + 4 + 8 + 8 - 8),
    ),
    "in place: two sources serve two outputs": Case(
        _graph([8, 4, 8, 8], [_makes(0, 1), _maps((0, 1), (2, 3), ((0, 2), (1, 3)))]),
        (0, 1),
        (8 + 4, 8 + 4 + 8 + 8 - 8 - 4),
    ),
    "in place: two views of one source serve one output": Case(
        _graph([8, (8, 0), 8, 8], [_makes(0, 1), _maps((0, 1), (2, 3), ((0, 2), (1, 3)))]), (0, 1), (8, 8 + 8 + 8 - 8)
    ),
    "in place: recomputation frees the source for it": Case(
        _graph([8, 8], [_makes(0), _maps((0,), (1,), ((0, 1),)), _reads(0)]), (0, 1, 0, 2), (8, 8, 8, 8)
    ),
    "zero-sized tensors": Case(_graph([0, 4], [_makes(0), _maps((0,), (1,))]), (0, 1), (0, 4)),
}
