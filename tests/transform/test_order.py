"""A step whose regions run in one place each."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from remat.transform.order import order_around
from remat.transform.separable import Call, Program, Region


def step(*reads):
    """Calls that make one value each, and read those of other calls."""
    calls = tuple(Call(tuple(read), (number,)) for number, read in enumerate(reads))
    return Program(calls, ((1,),) * len(calls), (4,) * len(calls), frozenset({len(calls) - 1}))


def region(*calls):
    return Region(dict.fromkeys(calls), {}, frozenset(), 2, 0)


def test_a_region_stands_where_its_last_call_does():
    cut = region(0, 2)
    assert order_around(step([], [], [0, 1], [2]), [cut]) == (1, cut, 3)


def test_a_region_stands_before_the_first_that_reads_of_it():
    cut = region(0, 2)
    assert order_around(step([], [0], [0], [2]), [cut]) == (cut, 1, 3)


def test_regions_that_wait_for_one_another_have_no_order():
    program = step([], [0], [], [2])
    one, other = region(0, 3), region(1, 2)
    assert order_around(program, [one]) is not None
    assert order_around(program, [other]) is not None
    assert order_around(program, [one, other]) is None


@given(st.data())
def test_there_is_an_order_just_where_no_region_waits_for_itself(data):
    count = data.draw(st.integers(1, 12))
    program = step(*(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)))
    part_of = data.draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    regions = [region(*calls) for part in range(3) if (calls := [n for n in range(count) if part_of[n] == part])]
    order = order_around(program, regions)

    node = {index: -1 - number for number, cut in enumerate(regions) for index in cut.ways}
    waits_for = {node.get(n, n): set() for n in range(count)}
    for reader in range(count):
        for read in program.calls[reader].inputs:
            if node.get(reader) is None or node.get(reader) != node.get(read):
                waits_for[node.get(reader, reader)].add(node.get(read, read))
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError:
        assert order is None
        return
    assert order is not None
    done = set()
    for one in order:
        calls = one.ways if isinstance(one, Region) else (one,)
        assert all(read in done or read in calls for call in calls for read in program.calls[call].inputs)
        done.update(calls)
    assert done == set(range(count))
