"""A callback that writes a model's plan, its predicted and its measured peak where TensorBoard shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import keras

from remat.core.plan import Plan
from remat.keras.limit import plan_of

# Numbers of the kinds of data in TensorBoard's file format (``tensorboard.DataClass``), which a dashboard looks for.
_DATA_CLASSES: Final = {"scalars": 1, "text": 2}


class LogPlan(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs the plan of a model with ``limit_memory`` to TensorBoard, whenever ``fit`` has made a new one.

    ::

        remat.keras.limit_memory(model, "4GiB")
        model.fit(x, y, callbacks=[remat.keras.LogPlan("logs")])

    The plan is a text, ``remat/plan``. The scalars are ``remat/predicted_peak_bytes``, ``remat/measured_peak_bytes``
    (of the first planned step), ``remat/budget_bytes`` and ``remat/overhead``, a fraction of the plain step's time.

    Args:
        log_dir: folder for the events, as that of ``keras.callbacks.TensorBoard``.

    Raises:
        ModuleNotFoundError: without TensorFlow, whose summary writer is used.
        ValueError: when training begins, for a model without a limit.
    """

    def __init__(self, log_dir: str | Path) -> None:
        super().__init__()
        try:
            import tensorflow as tf
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LogPlan writes events with TensorFlow's summary writer, and TensorFlow is not installed; "
                "remat.keras.plan_of(model) has the same figures"
            ) from error
        self._tf: Any = tf
        self._log_dir = str(log_dir)
        self._writer: Any = None
        self._logged: tuple[Plan, int | None] | None = None
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the file."""
        plan_of(self.model)
        self._writer = self._tf.summary.create_file_writer(self._log_dir)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log a plan that is new, or measured since."""
        self._step += 1
        plan = plan_of(self.model)
        if plan is not None and (plan, plan.measured_peak_bytes) != self._logged:
            self._logged = (plan, plan.measured_peak_bytes)
            self._log(plan)

    def on_train_end(self, logs: Any = None) -> None:
        """Close the file."""
        self._writer.close()

    def _log(self, plan: Plan) -> None:
        numbers = {
            "predicted_peak_bytes": plan.peak_bytes,
            "measured_peak_bytes": plan.measured_peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "overhead": plan.overhead,
        }
        with self._writer.as_default(step=self._step):
            self._write("text", "remat/plan", self._tf.constant([f"```\n{plan}\n```"]))
            for name, value in numbers.items():
                if value is not None:
                    self._write("scalars", f"remat/{name}", self._tf.constant(value, self._tf.float32))
        self._writer.flush()

    def _write(self, plugin: str, name: str, value: Any) -> None:
        """As ``tf.summary.text`` and ``tf.summary.scalar`` do, which need TensorBoard itself."""
        kind = self._tf.compat.v1.SummaryMetadata
        metadata = kind(plugin_data=kind.PluginData(plugin_name=plugin), data_class=_DATA_CLASSES[plugin])
        self._tf.summary.write(name, value, metadata=metadata)
