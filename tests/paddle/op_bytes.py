"""Op by op: what a plain static program allocates and frees, beside what its graph says."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from remat.paddle import _private
from remat.paddle.emit.fences import _between_ops, settled_bytes
from remat.paddle.sequential import in_program_order
from remat.paddle.trace import op_facts
from remat.paddle.trace.program import trace_program
from remat.paddle.trace.sizes import Sizes
from remat.running.cost_model import get_profile

LONGEST_S = 0.1  # That a reading waits for Paddle's thread that frees, where more is allocated than the graph says.

_numbers = itertools.count()


@dataclass(frozen=True)
class OpBytes:
    """One operator, and bytes beyond those that lay there before it.

    Attributes:
        kind: of the operator.
        during: while it ran, by the graph and by Paddle's counter.
        after: when it was over, by the graph and by Paddle's counter.
    """

    kind: str
    during: tuple[int, int]
    after: tuple[int, int]


def op_bytes(main: Any, startup: Any, feed: Mapping[str, np.ndarray], fetch: Sequence[Any]) -> list[OpBytes]:
    """Each operator of a program that nobody ran, in the second of two steps."""
    traced = trace_program(main, get_profile("cpu"), Sizes(main), kept=fetch)
    graph = traced.graph
    alive = (traced.alive_bytes(graph.plain_schedule) - graph.pinned_bytes).tolist()
    between = _between_ops(traced.lifetimes(graph.plain_schedule), len(graph.plain_schedule))[0].tolist()
    places: dict[int, list[int]] = {}
    for place, unit in enumerate(traced.units):  # A dropout is one operator and two units.
        places.setdefault(_private.op_id(unit.op), []).append(place)
    ops = [op for op in main.global_block().ops if op_facts.is_own(op) and _private.op_id(op) in places]
    expected_here = [int(between[places[_private.op_id(op)][0]]) for op in ops]
    readings: list[tuple[int, int]] = []

    def read() -> None:
        at_start = readings[0][0] - expected_here[0] if readings else settled_bytes()
        until = time.monotonic() + LONGEST_S
        while _private.allocated_bytes() > at_start + expected_here[len(readings)] and time.monotonic() < until:
            time.sleep(0.0005)
        readings.append((_private.allocated_bytes(), _private.peak_bytes()))
        _private.reset_peak()

    probe = _private.PythonOp(f"remat_probe_{next(_numbers)}", read)
    with _private.insertion_point_kept():
        for op in ops:
            _private.insert_before(op)
            probe.insert()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    with in_program_order():
        for _ in range(2):
            readings.clear()
            gc.collect()
            executor.run(main, feed=dict(feed), fetch_list=list(fetch))
    found = []
    for here, then, (before, _), (after, peak) in zip(ops, ops[1:], readings, readings[1:], strict=False):
        units, next_units = places[_private.op_id(here)], places[_private.op_id(then)]
        expected = max(alive[unit] for unit in units) - between[units[0]]
        left = between[next_units[0]] - between[units[0]]
        found.append(OpBytes(op_facts.kind(here), (int(expected), peak - before), (int(left), after - before)))
    return found
