"""The chain LP's bound against searches over all schedules, and how near it comes where the optimum is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from brute_force import least_time_s
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat import Graph, Op, Tensor, simulate
from remat.planners import overhead_lower_bound
from remat.planners.linear import bounds
from remat.planners.linear.binding_steps import binding_steps, needed_bytes
from remat.planners.linear.bounds import chain_lower_bound_s
from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.linear.highs import LinearModel, interior_point, proven_minimum, row_multipliers
from remat.planners.linear.window import WindowModel
from remat.planners.view.problem import Problem
from remat.testing import exhaustive, graphs, layered, random_graph, residual_blocks


@settings(max_examples=60, deadline=None)
@given(graph=graphs(min_ops=3, max_ops=5, max_size_bytes=6, free_order=False), share=st.floats(0.3, 1.0))
def test_never_above_brute_force_with_views_and_overwritten_inputs(graph: Graph, share: float) -> None:
    budget_bytes = int(share * simulate(graph, graph.plain_schedule).peak_bytes)
    least = least_time_s(graph, budget_bytes, extra_runs=3)
    if least is not None:
        assert chain_lower_bound_s(Problem.of(graph), budget_bytes) <= least - graph.time_s + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(min_ops=3, max_ops=5, max_size_bytes=6, free_order=False), share=st.floats(0.3, 1.0), data=st.data()
)
def test_no_choice_of_samples_proves_too_much(graph: Graph, share: float, data: st.DataObject) -> None:
    budget_bytes = int(share * simulate(graph, graph.plain_schedule).peak_bytes)
    least = least_time_s(graph, budget_bytes, extra_runs=3)
    chosen = data.draw(st.sets(st.integers(0, len(graph.ops) - 1), min_size=1))
    follows = data.draw(st.booleans())
    model = WindowModel(
        Problem.of(graph), budget_bytes, len(chosen), chosen=tuple(sorted(chosen)), follows_gradients=follows
    )
    if least is not None and len(model.linear.cost):
        multipliers = row_multipliers(model.linear, time_limit_s=10)
        assert multipliers is not None
        assert proven_minimum(model.linear, multipliers) * model.time_unit_s <= least - graph.time_s + 1e-9


@settings(max_examples=100, deadline=None)
@given(graph=graphs(min_ops=2, max_ops=12, max_size_bytes=16, free_order=False), data=st.data())
def test_the_plain_schedule_needs_what_the_simulator_says(graph: Graph, data: st.DataObject) -> None:
    """With everything kept that a later op of the plain schedule reads, and nothing run again."""
    ops = tuple(Op(**{**vars(op), "in_place": ()}) for op in graph.ops)
    graph = Graph(ops, graph.tensors, graph.inputs, graph.outputs, free_order=False)
    problem = Problem.of(graph)
    assume(problem.storages)
    vars(problem)["small"] = [False] * len(graph.tensors)  # Small storages are not followed.
    chosen = data.draw(st.sets(st.integers(0, len(graph.ops) - 1), min_size=1))
    model = WindowModel(problem, 0, len(chosen), chosen=tuple(sorted(chosen)))
    values = np.zeros(len(model.linear.cost))
    for (s, sample), column in model.kept.items():
        values[column] = problem.uses[s][-1] > model.places[sample]
    assert needed_bytes(model, values).tolist() == list(simulate(graph, graph.plain_schedule).bytes)


@pytest.mark.parametrize(("seed", "times"), [(1, 1.5), (2, 1.5), (3, 1.1)])
def test_samples_chosen_where_the_solution_needs_too_much_prove_more(
    seed: int, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.of(layered(80, seed, free_order=False))
    budget_bytes = problem.plain.peak_bytes // 2
    chosen_s = chain_lower_bound_s(problem, budget_bytes)
    monkeypatch.setattr(bounds, "_CHOICES", 0)
    assert chosen_s >= times * chain_lower_bound_s(problem, budget_bytes)


def test_many_samples_are_tried_only_where_chosen_ones_bring_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(layered(80, 1, free_order=False))
    budget_bytes = problem.plain.peak_bytes // 2
    solved: list[int] = []

    def noted(model: WindowModel, *limits: float) -> object:
        solved.append(0 if model.chosen else model.samples)
        return solve(model, *limits)

    solve = bounds._solved
    monkeypatch.setattr(bounds, "_solved", noted)
    chosen_s = chain_lower_bound_s(problem, budget_bytes)
    assert solved == [1, 4, 0, 0]

    # Where chosen samples make too large a model, the others are what there is.
    solved.clear()
    monkeypatch.setattr(bounds, "_MOST_ENTRIES_OF_CHOSEN", 0)
    other_s = chain_lower_bound_s(problem, budget_bytes)
    assert solved == [1, 4, 0, 16]
    assert 0 < other_s < chosen_s


def test_reserved_bytes_stay_free_at_their_step() -> None:
    problem = Problem.of(layered(80, 1, free_order=False))
    budget_bytes = problem.plain.peak_bytes // 2
    places = tuple(WindowModel(problem, budget_bytes, 2).places.tolist())
    plain = WindowModel(problem, budget_bytes, 2, chosen=places)
    reserved = WindowModel(problem, budget_bytes, 2, chosen=places, reserved_bytes={places[1]: budget_bytes // 8})
    solutions = [interior_point(model.linear, time_limit_s=10) for model in (plain, reserved)]
    assert solutions[0] is not None
    assert solutions[1] is not None
    changed = np.flatnonzero(plain.linear.row_high != reserved.linear.row_high)
    assert changed.tolist() == [plain.memory_rows[1]]
    assert reserved.linear.cost @ solutions[1][0] > plain.linear.cost @ solutions[0][0]


def test_a_sample_stays_while_it_binds_and_new_ones_exceed_the_budget() -> None:
    problem = Problem.of(layered(80, 1, free_order=False))
    model = WindowModel(problem, problem.plain.peak_bytes // 2, 4)
    solution = interior_point(model.linear, time_limit_s=10)
    assert solution is not None
    chosen = binding_steps(model, *solution)
    needed = needed_bytes(model, solution[0])
    new = set(chosen) - set(model.places.tolist())
    assert chosen == tuple(sorted(chosen))
    assert 0 < len(new) <= 4
    assert all(needed[op] > model.budget_bytes for op in new)
    binding = np.abs(solution[1][model.memory_rows])
    assert int(model.places[binding.argmax()]) in chosen


def test_a_gradient_that_is_made_again_needs_what_its_op_reads() -> None:
    """Nothing stays beside the wide op. The second gradient takes 1 s again, and the first, which only it reads, 9."""
    ops = (
        Op("forward", inputs=(0,), outputs=(1,), time_s=1.0),
        Op("first", inputs=(1,), outputs=(2,), time_s=9.0),
        Op("second", inputs=(2,), outputs=(3,), time_s=1.0),
        Op("wide", inputs=(0,), outputs=(4,)),
        Op("use", inputs=(3,), outputs=(5,)),
    )
    tensors = tuple(Tensor(size) for size in (0, 10, 10, 10, 30, 0))
    graph = Graph(ops, tensors, (0,), (), free_order=False, turning_point=0)
    model = WindowModel(Problem.of(graph), 30, 1, chosen=(3,), follows_gradients=True)
    multipliers = row_multipliers(model.linear, time_limit_s=10)
    assert multipliers is not None
    assert proven_minimum(model.linear, multipliers) * model.time_unit_s == pytest.approx(10.0)


def test_chosen_samples_among_gradients_prove_nothing_false() -> None:
    """Against exhaustive search, on steps whose forward part is so short that most ops are gradients."""
    rng, compared, met = random.Random(5), 0, 0
    while compared < 200:
        drawn = random_graph(rng, rng.randint(5, 9), free_order=False, max_size_bytes=16)
        ops = tuple(Op(**{**vars(op), "in_place": ()}) for op in drawn.ops)
        tensors = tuple(Tensor(t.size_bytes) for t in drawn.tensors)
        graph = Graph(ops, tensors, drawn.inputs, drawn.outputs, False, turning_point=rng.randint(0, 2))
        problem = Problem.of(graph)
        budget_bytes = rng.randint(problem.largest_step_bytes, problem.plain.peak_bytes)
        found = None if problem.plain.peak_bytes <= budget_bytes else exhaustive(graph, budget_bytes)
        heaviest = int(np.argmax(problem.plain.bytes))
        chosen = tuple(sorted({heaviest, *rng.sample(range(len(ops)), rng.randint(1, len(ops)))}))
        model = WindowModel(problem, budget_bytes, len(chosen), chosen=chosen, follows_gradients=True)
        if found is None or not len(model.linear.cost):
            continue
        multipliers = row_multipliers(model.linear, time_limit_s=10)
        assert multipliers is not None
        bound_s = proven_minimum(model.linear, multipliers) * model.time_unit_s
        extra_s = simulate(graph, found).time_s - graph.time_s
        assert bound_s <= extra_s + 1e-9
        compared += 1
        met += bound_s > 0.99 * extra_s > 0
    assert met >= 5


def test_never_above_exhaustive_search_and_often_equal() -> None:
    proven = exact = better = 0
    rng = random.Random(0)
    while proven < 60:
        drawn = random_graph(rng, rng.randint(5, 9), free_order=False, max_size_bytes=16)
        ops = tuple(Op(**{**vars(op), "in_place": ()}) for op in drawn.ops)
        graph = Graph(ops, tuple(Tensor(t.size_bytes) for t in drawn.tensors), drawn.inputs, drawn.outputs, False)
        problem = Problem.of(graph)
        budget_bytes = rng.randint(problem.largest_step_bytes, problem.plain.peak_bytes)
        found = None if problem.plain.peak_bytes <= budget_bytes else exhaustive(graph, budget_bytes)
        if found is None or simulate(graph, found).time_s <= graph.time_s:
            continue
        extra_s = simulate(graph, found).time_s - graph.time_s
        bound_s = chain_lower_bound_s(problem, budget_bytes)
        gap = solve_gap_model(build_gap_model(problem, budget_bytes), time_limit_s=10)
        assert bound_s <= extra_s + 1e-9
        proven += 1
        exact += bound_s >= 0.999 * extra_s
        better += gap is not None and bound_s > 1.01 * gap.bound_s
    assert exact >= 3
    assert better >= 10


def beside_a_wide_op(*, may_repeat_y: bool) -> Graph:
    """``z`` is made from ``y``, ``y`` from ``x``; then comes a wide op, then a reader of ``x`` and ``z``."""
    tensors = tuple(Tensor(size) for size in (0, 10, 10, 10, 30, 0))
    ops = (
        Op("x", inputs=(0,), outputs=(1,), time_s=9.0),
        Op("y", inputs=(1,), outputs=(2,), time_s=2.0, recomputable=may_repeat_y),
        Op("z", inputs=(2,), outputs=(3,), time_s=1.0),
        Op("wide", inputs=(0,), outputs=(4,)),
        Op("use", inputs=(1, 3), outputs=(5,)),
    )
    return Graph(ops, tensors, (0,), (), free_order=False)


def test_what_a_recomputation_reads_is_made_again_too() -> None:
    """There is room for one of them. Kept is ``x``, from which the others come again; else ``z``, and ``x`` again."""
    graph = beside_a_wide_op(may_repeat_y=True)
    gap = solve_gap_model(build_gap_model(Problem.of(graph), 40), time_limit_s=10)
    assert gap is not None
    assert gap.bound_s == pytest.approx(1.0)
    found = overhead_lower_bound(graph, 40)
    assert found.time_s == pytest.approx(3.0)
    assert found.meaning == "chain LP, proven for every legal schedule"
    assert chain_lower_bound_s(Problem.of(beside_a_wide_op(may_repeat_y=False)), 40) == pytest.approx(9.0)


@pytest.mark.parametrize("seed", [0, 3])
def test_more_samples_never_lose_what_fewer_proved(seed: int) -> None:
    problem = Problem.of(layered(50, seed, free_order=False))
    found = []
    for samples in (1, 2, 4, 8):
        model = WindowModel(problem, int(0.7 * problem.plain.peak_bytes), samples)
        multipliers = row_multipliers(model.linear, time_limit_s=10)
        assert multipliers is not None
        found.append(proven_minimum(model.linear, multipliers) * model.time_unit_s)
    assert found[-1] > 1.05 * found[0]
    assert found[-1] >= max(found) - 1e-3


def test_any_multipliers_prove_something_true() -> None:
    """Minimise x + 2 y with x + y >= 1.5: the optimum 2 is reached at x = 1, y = 0.5."""
    model = LinearModel(
        cost=np.array([1.0, 2.0]),
        low=np.zeros(2),
        high=np.ones(2),
        row_low=np.array([1.5]),
        row_high=np.array([np.inf]),
        rows=np.array([0, 0]),
        columns=np.array([0, 1]),
        values=np.array([1.0, 1.0]),
    )
    assert proven_minimum(model, np.array([2.0])) == pytest.approx(2.0)
    for multiplier in np.linspace(-3, 6, 37):
        assert proven_minimum(model, np.array([multiplier])) <= 2.0


def test_a_step_of_50_000_ops_has_a_bound() -> None:
    """It takes a second, and saves the methods behind the first one that comes near it, which take minutes."""
    graph = residual_blocks(6250)
    budget_bytes = simulate(graph, graph.plain_schedule).peak_bytes // 2
    assert len(graph.ops) > 50_000
    assert 0.15 < chain_lower_bound_s(Problem.of(graph), budget_bytes, most_samples=1) / graph.time_s < 0.16
