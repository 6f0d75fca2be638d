"""Keras 3: ``limit_memory`` makes ``model.fit`` keep a byte budget, with the same numbers.

model.compile(...)
remat.keras.limit_memory(model, budget="4GiB")
model.fit(...)                      # as ever
print(remat.keras.plan_of(model))
"""

from __future__ import annotations

from remat.running.supported import KERAS, check_version

check_version(KERAS)  # The imports below reach for symbols that move between versions.

from remat.keras.check import check
from remat.keras.limit import graph_of, joint_plan_of, limit_memory, micro_batch_choice_of, plan_of
from remat.keras.log_plan import LogPlan
from remat.keras.recompute import recompute
from remat.keras.workload import trace_model

__all__ = [
    "LogPlan",
    "check",
    "graph_of",
    "joint_plan_of",
    "limit_memory",
    "micro_batch_choice_of",
    "plan_of",
    "recompute",
    "trace_model",
]
