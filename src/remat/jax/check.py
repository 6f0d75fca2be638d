"""``remat.jax.check``: does a function compute under a budget what it computes without?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.jax.workload import make_workload
from remat.running.check import CheckResult, check_workload
from remat.running.workload import StepOptions


def check(loss_fn: Callable[..., Any], *args: Any, budget: int | str = "60%", steps: int = 3) -> CheckResult:
    """Run a loss and its gradients plainly and under a budget; compare values, gradients and peaks.

    ``print`` the result for one line that says what differs and why.

    Args:
        loss_fn: returns a scalar; differentiated with respect to its first argument.
        *args: its arguments.
        budget: as ``remat.jax.value_and_grad`` takes it.
        steps: how often to run it.

    Raises:
        NotAStep: if the function returns no scalar.
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
    """
    return check_workload(make_workload((loss_fn, *args), StepOptions()), budget, steps)
