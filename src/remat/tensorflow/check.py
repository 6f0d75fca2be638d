"""``remat.tensorflow.check``: does a function compute under a budget what it computes without?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.running.check import CheckResult, check_workload
from remat.running.workload import StepOptions
from remat.tensorflow.workload import make_workload


def check(loss_fn: Callable[..., Any], *args: Any, budget: int | str = "60%", steps: int = 3) -> CheckResult:
    """Run a loss and its gradients plainly and under a budget; compare values, gradients, variables and peaks.

    ``print`` the result for one line that says what differs and why. Variables are set back at the end.

    Args:
        loss_fn: returns a scalar; differentiated with respect to the trainable variables that it reads.
        *args: its arguments.
        budget: as ``remat.tensorflow.GradientTape`` takes it.
        steps: how often to run it.

    Raises:
        NotAStep: if the function returns no scalar, or reads no variable.
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
    """
    return check_workload(make_workload((loss_fn, *args), StepOptions()), budget, steps)
