"""A callback that logs a model's plan, its predicted and its measured peak: to TensorBoard, or Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import keras

from remat.keras.limit import plan_of
from remat.running.plan_log import PlanLog

# Numbers of the kinds of data in TensorBoard's file format (``tensorboard.DataClass``), which a dashboard looks for.
_DATA_CLASSES: Final = {"scalars": 1, "text": 2}


class LogPlan(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs the plan of a model with ``limit_memory``, whenever ``fit`` has made a new one.

    ::

        remat.keras.limit_memory(model, "4GiB")
        model.fit(x, y, callbacks=[remat.keras.LogPlan("logs")])        # TensorBoard
        model.fit(x, y, callbacks=[remat.keras.LogPlan(wandb.init())])  # Weights & Biases, on any backend

    The plan is a text, ``remat/plan``. The scalars are ``remat/predicted_peak_bytes``, ``remat/measured_peak_bytes``
    (of the first planned step), ``remat/budget_bytes`` and ``remat/overhead``, a fraction of the plain step's time.

    Args:
        log_to: folder for TensorBoard's events, as that of ``keras.callbacks.TensorBoard``; or a run of Weights &
            Biases.

    Raises:
        ModuleNotFoundError: for a folder without TensorFlow, whose summary writer is used.
        TypeError: for what is no folder and no run.
        ValueError: when training begins, for a model without a limit.
    """

    def __init__(self, log_to: str | Path | Any) -> None:
        super().__init__()
        self._events = _Events(str(log_to)) if isinstance(log_to, str | Path) else None
        self._log = PlanLog(self._events or log_to)

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the file."""
        plan_of(self.model)
        if self._events is not None:
            self._events.open()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log a plan that is new, or measured since."""
        if self._events is not None:
            self._events.step += 1
        plan = plan_of(self.model)
        if plan is not None:
            self._log([plan])

    def on_train_end(self, logs: Any = None) -> None:
        """Close the file."""
        if self._events is not None:
            self._events.close()


class _Events:
    """A file of events, which TensorBoard shows, with the method of a run that ``PlanLog`` calls.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: str) -> None:
        try:
            import tensorflow as tf
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LogPlan writes events with TensorFlow's summary writer, and TensorFlow is not installed; "
                "remat.keras.plan_of(model) has the same figures"
            ) from error
        self._tf: Any = tf
        self._folder = folder
        self._writer: Any = None
        self.step = 0

    def open(self) -> None:
        """Make the file."""
        self._writer = self._tf.summary.create_file_writer(self._folder)

    def close(self) -> None:
        """End it."""
        self._writer.close()

    def log(self, data: Mapping[str, str | float], commit: bool) -> None:
        """Add texts and numbers."""
        with self._writer.as_default(step=self.step):
            for name, value in data.items():
                if isinstance(value, str):
                    self._add("text", name, self._tf.constant([f"```\n{value}\n```"]))
                else:
                    self._add("scalars", name, self._tf.constant(value, self._tf.float32))
        self._writer.flush()

    def _add(self, plugin: str, name: str, value: Any) -> None:
        """As ``tf.summary.text`` and ``tf.summary.scalar`` do, which need TensorBoard itself."""
        kind = self._tf.compat.v1.SummaryMetadata
        metadata = kind(plugin_data=kind.PluginData(plugin_name=plugin), data_class=_DATA_CLASSES[plugin])
        self._tf.summary.write(name, value, metadata=metadata)
