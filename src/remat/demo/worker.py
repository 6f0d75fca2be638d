"""One training run in a process of its own: ``python -m remat.demo.worker <request.json> <folder>``.

A fresh process is the fair way to measure: no memory, no compiled function and no random state of an earlier run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remat.core.errors import RematError
from remat.core.files import write_json
from remat.demo.results import FAILURE_FILE, GRAPH_FILE, PLAN_FILE, RESULT_FILE, WEIGHTS_FILE, RunResult


def main() -> int:
    """Train as the request says; write the result, the weights and the plan into the folder."""
    request, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    try:
        _train(request["model"], request["budget"], bool(request["quick"]), folder)
    except RematError as error:
        write_json(folder / FAILURE_FILE, {"error": str(error)})
        return 2
    return 0


def _train(name: str, budget: str | None, quick: bool, folder: Path) -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import numpy as np
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
        plan.save(folder / PLAN_FILE)
        graph.save(folder / GRAPH_FILE)
    np.savez(folder / WEIGHTS_FILE, **{weight.path: weight.numpy() for weight in work.model.weights})
    result = RunResult(
        model=name,
        budget=budget,
        measured_peak_bytes=max(peaks),
        first_step_s=times[0],
        step_time_s=sorted(times[1:])[len(times[1:]) // 2],
        losses=tuple(losses),
        final_loss=history["loss"][-1],
        final_accuracy=history["accuracy"][-1],
        versions={"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__},
    )
    write_json(folder / RESULT_FILE, asdict(result))


if __name__ == "__main__":
    sys.exit(main())
