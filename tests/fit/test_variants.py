"""Which ways to write a step are planned, where real peaks rise and fall along a menu that a model has ordered."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from remat.core.graph import Graph, Op, Tensor
from remat.fit.request import Request
from remat.fit.variants import Variants, cheapest_plan


@dataclass
class Way:
    """A step of one op that makes so many bytes in so many seconds, one byte of which is read by a second one."""

    size_bytes: int
    time_s: float
    graph: Graph = field(init=False)

    def __post_init__(self):
        ops = (
            Op("make", inputs=(), outputs=(0,), time_s=self.time_s, recomputable=False),
            Op("use", inputs=(0,), outputs=(1,)),
        )
        self.graph = Graph(ops, (Tensor(self.size_bytes), Tensor(1)), (), (1,))

    @property
    def graph_to_plan(self):
        return self.graph


def cheapest(ways, budget_bytes):
    variants = Variants([lambda way=way: Way(*way) for way in ways])
    return cheapest_plan(variants, budget_bytes, Request(budget_bytes, planner="store_all"), None)


AS_MODELLED = [(1000, 1.0), (900, 1.1), (700, 1.2), (500, 1.3), (300, 1.4)]


@pytest.mark.parametrize(("budget_bytes", "time_s"), [(950, 1.1), (710, 1.2), (701, 1.2), (700, 1.3), (301, 1.4)])
def test_the_variant_that_keeps_most_and_fits(budget_bytes, time_s):
    assert cheapest(AS_MODELLED, budget_bytes).time_s == pytest.approx(time_s)


def test_a_variant_that_needs_less_than_those_behind_it_is_found():
    """A bisection for 600 bytes goes to the last of these, and passes the third."""
    ways = [(1000, 1.0), (900, 1.1), (550, 1.2), (720, 1.3), (700, 1.4), (680, 1.5), (500, 1.6)]

    assert cheapest(ways, 601).time_s == pytest.approx(1.2)


def test_a_cheaper_variant_behind_the_first_that_fits_is_found():
    ways = [(1000, 1.0), (900, 1.1), (550, 1.4), (520, 1.3), (500, 1.2), (300, 1.5)]

    assert cheapest(ways, 601).time_s == pytest.approx(1.2)


def test_variants_aside_run_as_they_are_and_are_never_planned():
    made = []

    def aside():
        made.append(True)
        return Way(200, 1.05)

    variants = Variants([lambda way=way: Way(*way) for way in AS_MODELLED], aside=[aside])
    planned = cheapest_plan(variants, 950, Request(950, planner="store_all"), None)
    assert (len(variants), made) == (len(AS_MODELLED), [])
    assert planned.time_s == pytest.approx(1.1)

    (plan,) = variants.aside("its author")
    assert (plan.planner, plan.peak_bytes, plan.recomputed) == ("its author", 201, 0)
    assert plan.overhead == pytest.approx(0.05)
    assert variants.of_plan(plan).size_bytes == 200
    assert variants.of_plan(planned).size_bytes == 900
    assert len(made) == 1

    larger = variants.changed(lambda way: Way(way.size_bytes + 5, way.time_s))
    (changed,) = larger.aside("its author")
    assert changed.peak_bytes == 206
    assert larger.of_plan(changed).size_bytes == 205
