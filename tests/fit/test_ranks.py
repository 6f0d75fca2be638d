"""Processes that come to one plan, or to one error: here threads with a store of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import remat
from remat.core.graph import Graph, Op, Tensor
from remat.core.plan import plan_for_schedule
from remat.fit.ranks import Ranks, plan_of_all

COUNT = 3


class Shared:
    """A store that all threads reach."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def put(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)


def graph_of(size_bytes=4):
    return Graph((Op("double", "Mul", (0,), (1,)),), (Tensor(size_bytes), Tensor(size_bytes)), (0,), (1,))


def by_all(of_rank, patience_s=10.0, silent=()):
    """What each process comes to: a plan, or an error."""
    store = Shared()

    def run(number):
        if number in silent:
            return None
        graph, asked, make = of_rank(number)
        try:
            return plan_of_all(Ranks(number, COUNT, store, patience_s), "step", graph, asked, make)
        except Exception as error:
            return error

    with ThreadPoolExecutor(COUNT) as threads:
        return list(threads.map(run, range(COUNT)))


def test_all_follow_the_plan_of_the_first():
    made = []

    def of_rank(number):
        graph = graph_of()

        def make():
            made.append(number)
            return plan_for_schedule(graph, graph.plain_schedule, planner=f"of rank {number}")

        return graph, {"budget": "60%"}, make

    plans = by_all(of_rank)
    assert made == [0]
    assert plans[1] == plans[2] == plans[0]
    assert plans[2].planner == "of rank 0"


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (lambda number: (graph_of(4 + number // 2), {"budget": "60%"}), "fingerprint"),
        (lambda number: (graph_of(), {"budget": f"{60 + 5 * (number // 2)}%"}), "budget 60% on rank 0"),
        (lambda number: (graph_of(), {"budget": "60%", "JAX": f"0.{number // 2}"}), "JAX 0.1 on rank 2"),
    ],
)
def test_one_error_that_names_both(differs, said):
    def of_rank(number):
        def make():
            raise AssertionError("nothing is planned")

        return *differs(number), make

    errors = by_all(of_rank)
    assert {type(error) for error in errors} == {remat.PlanMismatch}
    assert len({str(error) for error in errors}) == 1
    assert "ranks 0 and 2 are about to run different steps" in str(errors[0])
    assert said in str(errors[0])


def test_a_budget_that_cannot_be_kept_is_the_same_error_in_all():
    def of_rank(number):
        def make():
            raise remat.InfeasibleBudget("too small", minimum_bytes=9, budget_bytes=1, binding_op="double")

        return graph_of(), {}, make

    errors = by_all(of_rank)
    assert [(type(e), str(e), e.minimum_bytes, e.budget_bytes, e.binding_op) for e in errors] == [
        (remat.InfeasibleBudget, "too small", 9, 1, "double")
    ] * COUNT


def test_what_else_goes_wrong_in_the_first_is_told_to_all():
    def of_rank(number):
        def make():
            raise ZeroDivisionError("by zero")

        return graph_of(), {}, make

    first, second, third = by_all(of_rank)
    assert isinstance(first, ZeroDivisionError)
    assert str(second) == str(third) == "rank 0 could not plan the step: ZeroDivisionError: by zero"


def test_a_process_that_plans_nothing_is_named():
    errors = by_all(lambda number: (graph_of(), {}, lambda: None), patience_s=0.2, silent=(1,))
    assert "rank 0 is about to run a planned step, and ranks [1] have planned none in 0 s" in str(errors[0])
    assert isinstance(errors[2], remat.PlanMismatch)
