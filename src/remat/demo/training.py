"""The demo's training runs, each in a process of its own.

A fresh process is the fair way to measure: no memory, no compiled function and no random state of an earlier run.
``train`` starts one; ``python -m remat.demo.training FOLDER`` is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from remat.core.errors import RematError
from remat.core.files import read_json, write_json
from remat.core.graph import load_graph
from remat.core.plan import load_plan
from remat.demo.results import Run, RunResult
from remat.running.process import JobFailed, answer_job, run_job

_RESULT_FILE: Final = "result.json"
_WEIGHTS_FILE: Final = "weights.npz"
_PLAN_FILE: Final = "plan.json"
_GRAPH_FILE: Final = "graph.json.gz"
_TIME_LIMIT_S: Final = 900.0  # The README's eight runs took 126 s together: one that takes 15 minutes hangs.
_TURNS: Final = 9
"""Epochs of each kind in which steps are timed, of eight steps, the first of which makes an iterator. A judgement: some
25 s a run. With three, five runs of one plan showed extra times from -7 to +17 % on a machine with other work."""

# The counter of CPU memory works with oneDNN only, which is the default on most machines but not on all.
_ENVIRONMENT: Final = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", "KERAS_BACKEND": "tensorflow"}


def train(model: str, budget: str | None, *, quick: bool) -> Run:
    """Train one model in a fresh process.

    Args:
        model: "residual" or "transformer".
        budget: as ``remat.keras.limit_memory`` takes it, or None for plain training.
        quick: a small model and few steps.

    Raises:
        JobFailed: if the process fails or takes too long; the message ends with what it said last.
    """
    return run_job(
        "remat.demo.training",
        {"model": model, "budget": budget, "quick": quick},
        _collect,
        doing=_described(model, budget),
        time_limit_s=_TIME_LIMIT_S,
        environment=_ENVIRONMENT,
    )


def main() -> int:
    """Do the run that the folder on the command line asks for; returns the exit code."""
    return answer_job(_work)


def _described(model: str, budget: str | None) -> str:
    return f"training {model} {'plainly' if budget is None else f'under {budget}'}"


def _collect(folder: Path) -> Run:
    fields: Any = read_json(folder / _RESULT_FILE)
    result = RunResult(**{**fields, "losses": tuple(fields["losses"])})
    with np.load(folder / _WEIGHTS_FILE) as archive:
        weights = {name: archive[name] for name in archive.files}
    planned = result.budget is not None
    return Run(
        result,
        weights,
        load_plan(folder / _PLAN_FILE) if planned else None,
        load_graph(folder / _GRAPH_FILE) if planned else None,
    )


def _work(request: dict[str, Any], folder: Path) -> None:
    try:
        _train(request["model"], request["budget"], bool(request["quick"]), folder)
    except RematError as error:
        raise JobFailed(f"{_described(request['model'], request['budget'])}: {error}") from error


def _train(name: str, budget: str | None, quick: bool, folder: Path) -> None:
    import keras
    import tensorflow as tf

    import remat.keras
    from remat.demo.models import make_workload
    from remat.tensorflow.peak.device import current_device

    tf.config.experimental.enable_op_determinism()
    # This pass of the graph optimizer reorders sums, and differently so where a plan has added operations. It is off
    # in the plain run and in the planned ones: then both compute the same sums in the same order, to the bit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})

    device = current_device()
    times: list[float] = []
    peaks: list[int] = []
    losses: list[float] = []
    images_seen, loss_seen = 0, 0.0

    class Meter(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal images_seen, loss_seen
            images_seen, loss_seen = 0, 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            device.reset_peak()
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal images_seen, loss_seen
            mean = float(logs["loss"])  # Waits until the step is done.
            times.append(time.perf_counter() - self.started)
            peaks.append(device.peak_bytes)
            # Keras reports the mean over the epoch so far; the picture shows each step's own loss.
            images = min(work.batch_size, len(work.images) - images_seen)
            total = mean * (images_seen + images)
            losses.append((total - loss_seen) / images)
            images_seen, loss_seen = images_seen + images, total

    work = make_workload(name, quick=quick)
    if budget is not None:
        remat.keras.limit_memory(work.model, budget=budget)
    history = work.model.fit(
        work.images, work.labels, batch_size=work.batch_size, epochs=work.epochs, verbose=0, callbacks=[Meter()]
    ).history

    if budget is not None:
        plan, graph = remat.keras.plan_of(work.model), remat.keras.graph_of(work.model)
        assert plan is not None
        assert graph is not None
        plan.save(folder / _PLAN_FILE)
        graph.save(folder / _GRAPH_FILE)
    np.savez(folder / _WEIGHTS_FILE, **{weight.path: weight.numpy() for weight in work.model.weights})
    step_time_s = plain_time_s = _median(times[1:])
    if budget is not None:
        step_time_s, plain_time_s = _times_in_turns(work, make_workload(name, quick=quick))
    result = RunResult(
        model=name,
        budget=budget,
        measured_peak_bytes=max(peaks),
        first_step_s=times[0],
        step_time_s=step_time_s,
        plain_time_s=plain_time_s,
        losses=tuple(losses),
        final_loss=history["loss"][-1],
        final_accuracy=history["accuracy"][-1],
        versions={"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__},
    )
    write_json(folder / _RESULT_FILE, asdict(result))


def _times_in_turns(planned: Any, plain: Any) -> tuple[float, float]:
    """Median seconds of a planned and of a plain step, epoch by epoch in turns: what the machine does hits both.

    Not step by step, which showed up to 5 points more: a step behind one of the other kind takes longer. The seconds
    are those of the turn whose ratio is in the middle. Medians over all turns are of two speeds where a machine changes
    its own meanwhile: one whose steps all took 1.27 times as long every half minute showed 1.33 to 1.49 in three of
    twelve runs of a plan that takes 1.09.
    """
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # Waits until the step is done.
            self.times.append(time.perf_counter() - self.started)

    turns: list[tuple[float, float]] = []
    for _ in range(_TURNS + 1):
        clocks = (Clock(), Clock())
        for work, clock in zip((planned, plain), clocks, strict=True):
            work.model.fit(work.images, work.labels, batch_size=work.batch_size, verbose=0, callbacks=[clock])
        turns.append((_median(clocks[0].times[1:]), _median(clocks[1].times[1:])))
    return of_the_middle_ratio(turns[1:])  # The first one traces the plain step.


def of_the_middle_ratio(turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of pairs of seconds, planned and plain, the one whose ratio is in the middle."""
    return sorted(turns, key=lambda turn: turn[0] / turn[1])[len(turns) // 2]


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    sys.exit(main())
