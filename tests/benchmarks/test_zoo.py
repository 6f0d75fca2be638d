"""The zoo's frame: what it measures, how it goes on where it was stopped, and what its tables say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo.frame import heap, scatter, worker
from benchmarks.zoo.frame.measure import difference, measured
from benchmarks.zoo.frame.subject import Prepared, Subject
from benchmarks.zoo.frame.table import as_markdown

import remat

ROOT = Path(__file__).parents[2]
PLAIN_BYTES, PEER_BYTES, SMALLEST_BYTES = 1000, 600, 300


class Model(Subject):
    """A model whose figures are known: a plan needs what it is given, down to the smallest."""

    peers = ("peer", "broken peer")

    def peer(self, method):
        if method == "broken peer":
            raise RuntimeError("cannot run this model")
        return self.prepared(PLAIN_BYTES if method == "plain" else PEER_BYTES)

    def planned(self, budget):
        wanted = int(budget.rstrip("%")) * PLAIN_BYTES // 100 if isinstance(budget, str) else budget
        if wanted < SMALLEST_BYTES:
            raise remat.InfeasibleBudget("", minimum_bytes=SMALLEST_BYTES, budget_bytes=wanted, binding_op="")
        return self.prepared(wanted + self.excess, 1e-3)

    def prepared(self, peak_bytes, off=0.0):
        values = [np.array([1.0, 2.0 + off])]
        return Prepared(peak_bytes, lambda: None, lambda: values, 0.5, 1.5, 0.1)

    excess = 0


class Captured(Model):
    """A model whose steps remat runs itself."""

    captures = True

    def planned(self, budget):
        return self.prepared(PLAIN_BYTES) if budget == "120%" else super().planned(budget)


class OverBudget(Model):
    excess = 20  # More than 1 % of each of its budgets.


class Told(OverBudget):
    def prepared(self, peak_bytes, off=0.0):
        return dataclasses.replace(
            super().prepared(peak_bytes, off), said="A step under this plan took 2 MiB, more than the budget of 1 MiB"
        )


class OwnBudget(Model):
    """A plan that knows the bytes that its percentage is."""

    def prepared(self, peak_bytes, off=0.0):
        return dataclasses.replace(super().prepared(peak_bytes, off), budget_bytes=peak_bytes // 2)


class Refused(Model):
    def planned(self, budget):
        if budget != SMALLEST_BYTES:
            raise remat.InfeasibleBudget("", minimum_bytes=SMALLEST_BYTES, budget_bytes=1, binding_op="")
        return super().planned(budget)


class Failing(Model):
    def planned(self, budget):
        raise RuntimeError("no plan for this model")


def record_of(model):
    return {"model": "a", "lines": measured(model, lambda _: None)}


def test_every_method_has_a_line():
    record = record_of(Model())
    lines = {line["method"]: line for line in record["lines"]}

    assert list(lines) == [
        "plain",
        "peer",
        "broken peer",
        "remat 60%",
        "remat 40%",
        "remat, smallest",
        "remat, bytes of peer",
    ]
    assert lines["remat, smallest"]["peak_bytes"] == SMALLEST_BYTES
    assert lines["remat, bytes of peer"]["peak_bytes"] == PEER_BYTES
    assert lines["broken peer"]["error"] == "RuntimeError: cannot run this model"
    assert lines["remat 60%"]["difference"] == pytest.approx(0.0005)
    assert lines["plain"]["difference"] == 0
    text = as_markdown("jax", [record], "here")
    assert (
        "4 plans: 0 over their budget by more than 1 %, 0 of them without a word, 0 refused at the bytes of a peer"
        in text
    )
    assert "| remat 60% | 0.00 | 60% |" in text


def test_rounding_of_a_gradient_that_is_zero_is_no_difference():
    loss, zero = np.float32(3.0), np.array([5e-10, -2e-10], np.float32)

    assert difference([loss, -zero], [loss, zero]) < 1e-9
    assert difference([loss, zero + np.float32(3e-3)], [loss, zero]) == pytest.approx(1e-3, rel=1e-3)
    assert difference([loss, np.float32(2e-6)], [loss, np.float32(1e-6)]) == pytest.approx(1.0)


def test_plans_that_fail_are_counted():
    text = as_markdown("jax", [record_of(Failing())], "here")
    assert "0 refused at the bytes of a peer, 4 ended by another error" in text


def test_plans_over_their_budget_and_refusals_are_counted():
    text = as_markdown("jax", [record_of(OverBudget()), record_of(Refused())], "here")
    assert "8 plans: 4 over their budget by more than 1 %, 4 of them without a word, 1 refused at the bytes" in text
    assert text.count("of the budget, without a word)") == 4
    assert "(103.3% of the budget, without a word)" in text  # 620 of the 600 that the peer takes.


def test_predicted_and_measured_time_are_compared(tmp_path):
    lines = record_of(Model())["lines"]
    for line in lines:
        if line["method"].startswith("remat"):
            line["relative_time"] = 1.35 if line["method"] == "remat 40%" else 1.15
    text = as_markdown("jax", [{"model": "a", "lines": lines}], "here")
    # Predicted are 10 % each time.
    assert "4 plans of 1 models: -10.0 points in the mean, 10.0 without its sign, -25.0 at worst (a, remat 40%)" in text
    assert "points in the mean" not in as_markdown("jax", [record_of(Failing())], "here")


def test_plans_of_a_captured_step_are_compared_with_it_as_it_is():
    lines = record_of(Captured())["lines"]
    assert [line["method"] for line in lines][:4] == ["plain", "peer", "broken peer", "remat, nothing recomputed"]
    for line in lines:
        if line["method"].startswith("remat"):
            line["relative_time"] = 0.8 if "nothing" in line["method"] else 0.88
    record = {"model": "a", "lines": lines}

    # Predicted are 10 % each time, which is what .88 takes more than .8.
    assert {round(one.error, 9) for one in scatter.predictions([record])} == {0}
    assert "was measured (1 models)" in as_markdown("torch", [record], "here")
    assert "in place of the framework" not in as_markdown("jax", [record_of(Model())], "here")


def test_the_first_step_after_another_methods_is_not_timed():
    ran = []

    class Disturbed(Captured):
        """A step takes nine times as long where the one before was of another method."""

        def prepared(self, peak_bytes, off=0.0):
            seconds = [0.0]

            def run():
                seconds[0] += 1.0 if ran and ran[-1] is seconds else 9.0
                ran.append(seconds)

            return dataclasses.replace(super().prepared(peak_bytes, off), run=run, clock=lambda: seconds[0])

    lines = [line for line in record_of(Disturbed())["lines"] if "error" not in line]
    assert len(lines) >= 5
    assert {line["step_s"] for line in lines} == {1.0}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no process on a core")
def test_a_process_stays_on_one_core():
    script = "import os; from benchmarks import one_core; one_core.stay_on_one_core(); print(os.sched_getaffinity(0))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{{{max(os.sched_getaffinity(0))}}}"]


def test_a_model_is_measured_on_one_core(monkeypatch, capsys):
    done = []
    monkeypatch.setattr(worker, "stay_on_one_core", lambda: done.append("one core"))
    monkeypatch.setattr(worker, "is_apart", lambda _: False)
    monkeypatch.setattr(worker, "models_of", lambda _: {"a": lambda: done.append("built")})
    monkeypatch.setattr(worker, "measured", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["worker", "jax", "a"])
    worker.main()

    assert done == ["one core", "built"]
    assert json.loads(capsys.readouterr().out)["model"] == "a"


def test_pages_are_left_out_of_what_predictions_compare_with_where_these_do_not_know_them():
    class Fetching(Captured):
        predicts_pages = False

        def prepared(self, peak_bytes, off=0.0):
            fetching = lambda: np.ones(48 << 20 >> 3 if peak_bytes == PLAIN_BYTES else 1).sum()  # noqa: E731
            return dataclasses.replace(super().prepared(peak_bytes, off), run=fetching)

    record = record_of(Fetching())
    timed = {line["method"]: line for line in record["lines"] if "pages_s" in line}
    assert "pages_s" not in record_of(Captured())["lines"][0]
    assert set(timed) == {line["method"] for line in record["lines"] if "error" not in line}
    assert timed["plain"]["pages_s"] > 10 * timed["remat 40%"]["pages_s"]

    for method, line in timed.items():
        is_whole = method in ("plain", "remat, nothing recomputed")
        # A fifth of the whole step goes for pages: without them a plan takes 10 % more, with them it takes less.
        line.update(step_s=1.0 if is_whole else 0.88, pages_s=0.2 if is_whole else 0.0)
        line["relative_time"] = line["step_s"]
    assert {round(one.error, 9) for one in scatter.predictions([record])} == {0}
    assert "Of 1 models extra time above is without" in as_markdown("torch", [record], "here")
    assert "20.0% of a plain step" in as_markdown("torch", [record], "here")


def planned_line(method, predicted, relative_time):
    return {"method": method, "predicted": predicted, "relative_time": relative_time}


RECORDS = [
    {
        "model": "a",
        "lines": [
            planned_line("plain", None, 1.0),
            planned_line("the peer", None, 1.5),
            planned_line("remat 60%", 0.10, 1.12),
            planned_line("remat 40%", 0.20, 1.15),
            planned_line("remat, bytes of the peer", 0.30, 1.40),
            planned_line("remat, bytes of another peer", 0.30, 1.32),
        ],
    },
    {
        "model": "b",
        "lines": [
            planned_line("plain", None, 1.0),
            {"method": "remat 60%", "budget": "60%", "error": "refused: the smallest is 1000"},
            {"method": "remat 40%", "budget": "40%", "error": "RuntimeError: no memory", "predicted": 0.9},
            planned_line("remat, smallest", 0.50, 1.42),
        ],
    },
    {"model": "c", "error": "exit code -9"},
]
"""Plans that ran, beside what is none: peers, refused budgets, a plan that did not run, a model that did not."""


def test_errors_of_predicted_time_are_told_by_budget():
    found = scatter.predictions(RECORDS)

    # By hand: -2, +5, -10 and -2 points of a, +8 of b.
    assert [round(100 * one.error) for one in found] == [-2, 5, -10, -2, 8]
    rows = {row.split(" | ")[0].lstrip("| "): row for row in scatter.table(found)}
    assert list(rows)[2:] == ["40%", "smallest", "in a peer's bytes", "all", "each model's median"]
    assert rows["40%"] == "| 40% | 1 | 1 | +5.0 | +5.0 | 5.0 | 5.0 | 0 | +5.0 (a) |"
    assert rows["smallest"] == "| smallest | 1 | 1 | +8.0 | +8.0 | 8.0 | 8.0 | 0 | +8.0 (b) |"
    assert rows["in a peer's bytes"] == "| in a peer's bytes | 2 | 1 | -6.0 | -6.0 | 6.0 | 6.0 | 1 | -10.0 (a) |"
    assert rows["all"] == "| all | 5 | 2 | -0.2 | -2.0 | 5.4 | 5.0 | 2 | -10.0 (a) |"
    # Medians of 2, 5, 10 and 2, and of 8.
    assert rows["each model's median"] == "| each model's median | | 2 | | | 5.8 | 5.8 | 0 | 8.0 |"
    assert scatter.table([]) == []


def test_the_picture_has_predicted_time_on_its_horizontal_axis(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("remat.report.plots.save_figure", lambda figure, path: drawn.append(figure))
    scatter.draw(scatter.predictions(RECORDS), "zoo", tmp_path / "zoo.png")

    (axes,) = drawn[0].axes
    points = {line.get_label(): [list(map(round, values)) for values in line.get_data()] for line in axes.lines}
    assert points["40%: 1"] == [[20], [15]]
    assert points["in a peer's bytes: 2"] == [[30, 30], [40, 32]]
    diagonal = axes.lines[-1].get_data()
    assert list(diagonal[0]) == list(diagonal[1])
    assert "predicted" in axes.get_xlabel()
    assert "measured" in axes.get_ylabel()
    # The worst is named first.
    assert [text.get_text() for text in axes.texts][:2] == ["a, in a peer's bytes", "b, smallest"]


class PartlyCounted(Model):
    """Its counter leaves out as much as it shows of every step."""

    def prepared(self, peak_bytes, off=0.0):
        return dataclasses.replace(super().prepared(peak_bytes, off), beside_bytes=peak_bytes << 20)


def test_what_a_counter_leaves_out_is_shown_beside_it():
    text = as_markdown("keras-tensorflow", [record_of(PartlyCounted())], "here")
    assert f"| plain | 0.00 + {PLAIN_BYTES}.00 | 100% |" in text
    assert "blocks below 256 KiB" in text
    assert "blocks below 256 KiB" not in as_markdown("jax", [record_of(Model())], "here")


IN_SMALL_BLOCKS = """
import ctypes, json
from benchmarks.zoo.frame.heap import most_in, most_in_small_blocks

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    blocks = [c.malloc(size << 10) for size in (100, 200, 300, 400)]
    for block in blocks:
        c.free(block)

print(json.dumps([most_in(step), most_in_small_blocks(step)]))
"""


IN_CIRCLES = """
import gc, json
from benchmarks.zoo.frame.heap import most_in

class Held:
    pass

def step():
    gc.collect()  # As Python does by itself, sooner or later: what an earlier step left is freed here.
    one = Held()
    one.itself, one.bytes = one, bytearray(4 << 20)

print(json.dumps([most_in(step) for _ in range(3)]))
"""


def counted(script):
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | heap.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_what_an_earlier_step_left_in_circles_does_not_count_against_the_next():
    for most in counted(IN_CIRCLES):
        assert most == pytest.approx(4 << 20, rel=0.05)


def test_small_blocks_of_the_heap_are_told_apart():
    everything, small = counted(IN_SMALL_BLOCKS)
    assert everything == pytest.approx(1000 << 10, rel=0.05)
    assert small == pytest.approx(300 << 10, rel=0.1)


def test_what_was_told_is_not_without_a_word():
    text = as_markdown("torch", [record_of(Told())], "here")
    assert "4 plans: 4 over their budget by more than 1 %, 0 of them without a word" in text
    assert text.count("of the budget, told)") == 4


def test_a_plan_may_know_its_budget_itself():
    lines = {line["method"]: line for line in record_of(OwnBudget())["lines"]}
    assert lines["remat 60%"]["of_budget"] == 2
    assert lines["remat 60%"]["is_over"]


def test_the_zoo_goes_on_where_it_was_stopped(monkeypatch, tmp_path):
    ran = []

    def run(framework, name, limit_s):
        ran.append(name)
        return {**record_of(Model()), "model": name}

    monkeypatch.setattr(zoo, "run", run)
    monkeypatch.setattr(zoo, "models_of", lambda framework: dict.fromkeys(("a", "b"), Model))
    for arguments in (["--only", "a"], [], ["--only", "b", "--again"]):
        monkeypatch.setattr(sys, "argv", ["zoo", "--frameworks", "jax", "--out", str(tmp_path), *arguments])
        zoo.main()

    assert ran == ["a", "b", "b"]
    table = json.loads((tmp_path / "zoo-jax.json").read_text())
    assert list(table["records"]) == ["a", "b"]
    assert (tmp_path / "zoo-jax.md").read_text().count("\n## ") == 2
    assert (tmp_path / "zoo-jax.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_written_again_without_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(zoo, "run", lambda *_: pytest.fail("a model was measured"))
    monkeypatch.setattr(zoo, "models_of", lambda framework: dict.fromkeys(("a", "b", "not measured"), Model))
    # Of other versions than those that are installed: these must stay.
    table = {
        "machine": {"system": "Linux", "processor": "x", "cores": 2},
        "versions": {"remat": "0.0.1"},
        "notes": ["Timed by hand."],
        "records": {record["model"]: record for record in RECORDS[2:]} | {"a": {"model": "a", "error": "exit code 1"}},
    }
    (tmp_path / "zoo-jax.json").write_text(json.dumps(table))
    monkeypatch.setattr(sys, "argv", ["zoo", "--frameworks", "jax", "--out", str(tmp_path), "--tables"])
    zoo.main()

    assert "remat 0.0.1. Timed by hand.\n" in (tmp_path / "zoo-jax.md").read_text()
    assert json.loads((tmp_path / "zoo-jax.json").read_text()) == table


@pytest.mark.slow
def test_a_model_of_jax_is_measured_in_its_own_process(tmp_path):
    command = [sys.executable, "-m", "benchmarks.zoo", "--frameworks", "jax", "--only", "graph_network"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads((tmp_path / "zoo-jax.json").read_text())["records"].values()
    lines = record["lines"]

    assert len(lines) >= 6
    assert not any(line.get("is_over") for line in lines)
    assert all(line["difference"] < 1e-4 for line in lines if "error" not in line)


@pytest.mark.slow
def test_a_model_of_pytorch_is_counted_from_outside(tmp_path):
    command = [sys.executable, "-m", "benchmarks.zoo", "--frameworks", "torch", "--only", "ViT", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads((tmp_path / "zoo-torch.json").read_text())["records"].values()
    planned = [line for line in record["lines"] if line["method"].startswith("remat")]

    assert len(planned) == 5
    # What a ViT of this size cannot do is refused, with its smallest budget, which is among the others.
    refused = [line for line in planned if "error" in line]
    assert all("refused: the smallest is" in line["error"] for line in refused)
    kept = [line for line in planned if "error" not in line]
    assert len(kept) >= 3
    for line in kept:
        assert not line["is_over"]
        assert line["difference"] == 0
        # What PyTorch counts and what the heap shows are two ways to count, which agree.
        assert line["peak_bytes"] == pytest.approx(line["predicted_bytes"], rel=0.03)
