"""Keras 3: ``limit_memory`` makes ``model.fit`` keep a byte budget, with the same numbers.

model.compile(...)
remat.keras.limit_memory(model, budget="4GiB")
model.fit(...)                      # as ever
print(remat.keras.plan_of(model))
"""

from remat.keras.limit import graph_of, limit_memory, plan_of
from remat.keras.model_trace import trace_model
from remat.keras.recomputation import recompute

__all__ = ["graph_of", "limit_memory", "plan_of", "recompute", "trace_model"]
