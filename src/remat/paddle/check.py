"""``remat.paddle.check``: does a step compute under a budget what it computes without?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.paddle.workload import make_workload
from remat.running.check import CheckResult, check_workload
from remat.running.workload import StepOptions


def check(loss_fn: Callable[..., Any], *args: Any, budget: int | str = "60%", steps: int = 3) -> CheckResult:
    """Run a loss and its gradients plainly and under a budget; compare values, gradients, buffers and peaks.

    ``print`` the result for one line that says what differs and why. Parameters and buffers are set back at the end.

    Args:
        loss_fn: returns the loss; the layers that it closes over, is a method of, or is given are those compared.
        *args: its arguments.
        budget: as ``remat.paddle.value_and_grad`` takes it.
        steps: how often to run it.

    Raises:
        NotAStep: if the function returns no loss.
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
    """
    return check_workload(make_workload((loss_fn, *args), StepOptions()), budget, steps)
