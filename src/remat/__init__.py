"""remat: train the model that does not fit, inside a byte budget, with the same numbers.

Importing this package imports no framework. The front ends (``remat.tensorflow``, ``remat.jax``, ``remat.torch``,
``remat.paddle``, ``remat.keras``) are loaded when they are first touched.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from remat.core.budget import format_bytes, parse_budget
from remat.core.errors import (
    InfeasibleBudget,
    InvalidBudget,
    InvalidFile,
    InvalidGraph,
    InvalidSchedule,
    PlanMismatch,
    RematError,
    UnsupportedStep,
    UnsupportedVersion,
    WrongImportOrder,
)
from remat.core.graph import Graph, Op, Tensor, load_graph
from remat.core.plan import Plan, load_plan
from remat.core.simulator import Timeline, simulate
from remat.core.validator import validate
from remat.planning.frontier import frontier
from remat.planning.plan import plan

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "InfeasibleBudget",
    "InvalidBudget",
    "InvalidFile",
    "InvalidGraph",
    "InvalidSchedule",
    "Op",
    "Plan",
    "PlanMismatch",
    "RematError",
    "Tensor",
    "Timeline",
    "UnsupportedStep",
    "UnsupportedVersion",
    "WrongImportOrder",
    "__version__",
    "format_bytes",
    "frontier",
    "load_graph",
    "load_plan",
    "parse_budget",
    "plan",
    "simulate",
    "validate",
]

_LOADED_WHEN_TOUCHED = {
    "cost_model": "remat.running.cost_model",
    **{name: f"remat.{name}" for name in ("jax", "keras", "paddle", "planners", "tensorflow", "testing", "torch")},
}

# Hidden from type checkers, which would take it as leave for any name at all.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        if name in _LOADED_WHEN_TOUCHED:
            return importlib.import_module(_LOADED_WHEN_TOUCHED[name])
        raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LOADED_WHEN_TOUCHED})
