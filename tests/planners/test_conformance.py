"""One contract, every planner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance import check_planner
from remat import Graph, InvalidSchedule, Op, Tensor, plan, simulate, validate
from remat.planners import get_planner, planner_names, register
from remat.planners.linear import highs
from remat.planners.walk.annealing import Walk
from remat.testing import chain, graphs, residual_blocks

BLOCKS = residual_blocks(5)
SOME = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
all_planners = pytest.mark.parametrize("name", planner_names())


@SOME
@given(graph=graphs(max_ops=12), share=st.floats(0.0, 1.1))
def test_contract_on_random_graphs(graph: Graph, share: float) -> None:
    plain = simulate(graph, graph.plain_schedule).peak_bytes
    # All planners on one graph: its smallest peak, which takes the most time, is worked out once.
    for name in planner_names():
        with named(name):
            check_planner(get_planner(name), graph, int(share * plain))


@contextlib.contextmanager
def named(planner: str) -> Iterator[None]:
    """Says which planner it was that failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"planner {planner!r}")
        raise


CHAINS = {layers: chain(layers, free_order=False) for layers in (0, 1, 2, 8)}


@all_planners
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("layers", CHAINS)
def test_contract_on_chains(name: str, layers: int, share: float) -> None:
    graph = CHAINS[layers]
    check_planner(get_planner(name), graph, int(share * simulate(graph, graph.plain_schedule).peak_bytes))


@all_planners
@pytest.mark.parametrize("recomputable", [True, False])
def test_one_op_runs_once(name: str, recomputable: bool) -> None:
    graph = Graph((Op(outputs=(0,), time_s=1.0, recomputable=recomputable),), (Tensor(8),), (), (0,))
    for budget_bytes in (0, 7, 8):
        assert check_planner(get_planner(name), graph, budget_bytes) == (0,)


@all_planners
def test_empty_graph_has_the_empty_schedule(name: str) -> None:
    assert check_planner(get_planner(name), Graph((), ()), 0) == ()


@all_planners
def test_deterministic(name: str) -> None:
    budget_bytes = simulate(chain(20), chain(20).plain_schedule).peak_bytes // 2
    planner = get_planner(name)
    # Two graphs, so that nothing which is kept with a graph can make them equal.
    assert planner(chain(20), budget_bytes) == planner(chain(20), budget_bytes)


@pytest.mark.parametrize("name", sorted(set(planner_names()) - {"store_all"}))
def test_half_of_a_chain_is_met_by_every_method(name: str) -> None:
    graph = chain(20)
    budget_bytes = simulate(graph, graph.plain_schedule).peak_bytes // 2
    timeline = simulate(graph, get_planner(name)(graph, budget_bytes))
    assert timeline.peak_bytes <= budget_bytes
    assert graph.time_s < timeline.time_s <= 1.5 * graph.time_s


@all_planners
@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
def test_no_time_is_no_search(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ten seconds either: no model is solved and no walk is taken, and what comes back is legal."""
    graph, planner = BLOCKS, get_planner(name)
    # The smallest peak is worked out once for a graph, whatever the time.
    smallest_bytes = validate(graph, planner(graph, 1, time_limit_s=0))

    def searches(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} searched, though it was given no time")

    monkeypatch.setattr(highs, "_solver", searches)
    monkeypatch.setattr(Walk, "run", searches)
    budget_bytes = int(share * simulate(graph, graph.plain_schedule).peak_bytes)
    reached_bytes = validate(graph, planner(graph, budget_bytes, time_limit_s=0))
    assert reached_bytes <= max(budget_bytes, smallest_bytes)
    if share == 1.0:
        assert planner(graph, budget_bytes, time_limit_s=0) == graph.plain_schedule


def test_a_plan_without_time_has_no_proven_bound() -> None:
    hurried = plan(BLOCKS, "60%", time_limit_s=0)
    assert hurried.overhead > 0
    assert hurried.overhead_lower_bound == 0.0
    assert "trivial" in hurried.lower_bound_meaning


def forgets_an_op(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    return graph.plain_schedule[:-1]


def repeats_everything(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    return tuple(op for op in graph.plain_schedule for _ in range(2))


def boasts_of_a_peak(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Meets the smallest peak for small budgets only: it cannot be reached by asking for it."""
    layers = len(graph.ops) // 2
    if budget_bytes > 2:
        return graph.plain_schedule
    again = [op for layer in reversed(range(layers)) for op in (*range(layer), 2 * layers - 1 - layer)]
    return (*range(layers), *again)


@pytest.mark.parametrize(
    ("broken", "budget_bytes"), [(forgets_an_op, 1000), (repeats_everything, 1000), (boasts_of_a_peak, 2)]
)
def test_broken_planners_are_rejected(broken: Callable[..., tuple[int, ...]], budget_bytes: int) -> None:
    chained = chain(12)
    with pytest.raises((AssertionError, InvalidSchedule)):
        check_planner(broken, chained, budget_bytes)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no planner 'nope'.*auto.*sqrt_n"):
        get_planner("nope")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register("store_all")(get_planner("store_all"))
