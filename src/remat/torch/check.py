"""``remat.torch.check``: does a step compute under a budget what it computes without?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.running.check import CheckResult, check_workload
from remat.running.workload import StepOptions
from remat.torch.api.limit import Mode, check_mode
from remat.torch.workload import TorchFunction


def check(
    loss_fn: Callable[..., Any],
    *args: Any,
    budget: int | str = "60%",
    steps: int = 3,
    mode: Mode = "auto",
) -> CheckResult:
    """Run a loss and its gradients plainly and under a budget; compare values, gradients, buffers and peaks.

    ``print`` the result for one line that says what differs and why. Parameters and buffers are set back at the end.

    Args:
        loss_fn: returns the loss. Those modules are compared that it is given, or that its code names: from around it,
            by a global name, or as an attribute of an object.
        *args: its arguments.
        budget: as ``remat.torch.plan`` takes it.
        steps: how often to run it.
        mode: how the budget is kept, as ``limit_memory`` takes it.

    Raises:
        NotAStep: if the function returns no loss, or if no module can be found in it.
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
        ValueError: for an unknown mode.
    """
    return check_workload(TorchFunction(loss_fn, list(args), StepOptions(), check_mode(mode)), budget, steps)
