"""Pictures: the curves are the simulator's, the labels carry units, and files are written whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.patches import StepPatch

import remat
from remat import Graph, Op, Plan, PlanMismatch, Tensor
from remat.report import plots
from remat.testing import chain

GIB = 2**30


@pytest.fixture
def graph() -> Graph:
    return chain(12, size_bytes=GIB // 4, time_s=2e-3)


@pytest.fixture
def plan(graph: Graph) -> Plan:
    """Recomputes the first layer before its backward op, the last but one to read it."""
    schedule = (*range(len(graph.ops) - 2), 0, *range(len(graph.ops) - 2, len(graph.ops)))
    plain = remat.plan(graph, "100%")
    timeline = remat.simulate(graph, schedule)
    return replace(plain, schedule=schedule, peak_bytes=timeline.peak_bytes, budget_bytes=5 * GIB // 2)


def outlines(figure):
    (axes,) = figure.axes
    return [patch for patch in axes.patches if isinstance(patch, StepPatch) and not patch.get_fill()]


def test_memory_figure_draws_the_timelines(graph, plan):
    figure = plots.memory_figure(graph, plan)

    for patch, schedule in zip(outlines(figure), (graph.plain_schedule, plan.schedule), strict=True):
        values, edges, _ = patch.get_data()
        assert values * GIB == pytest.approx(remat.simulate(graph, schedule).bytes)
        assert edges[-1] == pytest.approx(2 * len(schedule))


def test_memory_figure_draws_the_budget_and_labels_the_units(graph, plan):
    figure = plots.memory_figure(graph, plan, title="A chain")

    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "A chain"
    assert axes.get_xlabel() == "predicted time (ms)"
    assert axes.get_ylabel() == "memory (GiB)"
    (budget,) = [line for line in axes.lines if str(line.get_label()).startswith("budget")]
    assert set(budget.get_ydata()) == {2.5}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    peak = remat.format_bytes(remat.simulate(graph, graph.plain_schedule).peak_bytes)
    assert labels[0] == f"plain: peak {peak}"
    assert labels[1].endswith("+4.2% time")
    assert "budget: 2.5 GiB" in labels


def test_memory_figure_without_a_plan_draws_the_plain_step_alone(graph):
    figure = plots.memory_figure(graph)

    assert len(outlines(figure)) == 1
    assert not any("budget" in text.get_text() for text in figure.legends[0].get_texts())


def test_budget_above_the_plain_peak_is_in_the_picture(graph, plan):
    figure = plots.memory_figure(graph, replace(plan, budget_bytes=50 * GIB))

    assert figure.axes[0].get_ylim()[1] > 50


def test_steps_without_times_are_counted():
    graph = chain(5, size_bytes=2**20, time_s=0.0)

    figure = plots.memory_figure(graph)

    assert figure.axes[0].get_xlabel() == "operation run"
    assert list(outlines(figure)[0].get_data().edges) == list(range(len(graph.ops) + 1))


@pytest.mark.parametrize(
    "graph",
    [Graph((), ()), Graph((Op(outputs=(0,)),), (Tensor(0),)), Graph((), (Tensor(5),), inputs=(0,))],
    ids=["empty", "no bytes", "only inputs"],
)
def test_graph_with_next_to_nothing_in_it_can_be_drawn(graph, tmp_path):
    plots.save_figure(plots.memory_figure(graph), tmp_path / "memory.png")

    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_plan_for_another_graph_is_refused(plan):
    with pytest.raises(PlanMismatch):
        plots.memory_figure(chain(11), plan)


def test_loss_figure_draws_every_history_the_later_thinner():
    histories = {"plain": [2.0, 1.0, 0.5], "60%": [2.0, 1.0, 0.5], "25%": [2.0, 1.0]}

    figure = plots.loss_figure(histories, x_label="step")

    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == list(histories.values())
    assert list(axes.lines[2].get_xdata()) == [1, 2]
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(set(widths), reverse=True)
    assert len({line.get_color() for line in axes.lines}) == 3
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(histories)


def test_loss_figure_of_one_epoch_shows_points():
    assert plots.loss_figure({"plain": [2.0]}).axes[0].lines[0].get_marker() == "o"


def test_loss_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.loss_figure({})


@pytest.mark.parametrize(("name", "start"), [("m.png", b"\x89PNG"), ("m.PNG", b"\x89PNG"), ("m.svg", b"<?xml")])
def test_ending_chooses_the_format(graph, tmp_path, name, start):
    plots.save_figure(plots.memory_figure(graph), tmp_path / name)

    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["memory", "memory.docx", ".png"])
def test_unknown_ending_is_refused(graph, tmp_path, name):
    with pytest.raises(ValueError, match=r"no picture format.*png.*svg"):
        plots.save_figure(plots.memory_figure(graph), tmp_path / name)


def test_failed_save_leaves_the_old_picture_alone(graph, tmp_path, monkeypatch):
    target = tmp_path / "memory.png"
    target.write_bytes(b"old")
    figure = plots.memory_figure(graph)

    def full_disk(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)

    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        plots.save_figure(figure, target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_drawing_needs_no_display_and_no_global_state():
    code = (
        "import sys; from remat.report import plots; assert 'matplotlib' not in sys.modules\n"
        "plots.loss_figure({'a': [1.0]}); print('matplotlib.pyplot' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert (result.stdout, result.stderr) == ("False\n", "")
