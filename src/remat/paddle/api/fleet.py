"""``fleet``: static programs on several processes, as ``paddle.distributed.fleet`` writes them.

Paddle's own static ``fleet.minimize`` does not work on programs of today's kind. This does what its recomputation and
its data parallelism promised: recomputation by the strategy's checkpoints or by a budget, and one ``all_reduce`` per
gradient between the backward pass and the update.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from remat.core.errors import UnsupportedStep
from remat.paddle.api.recompute_optimizer import RecomputeOptimizer


def distributed_optimizer(
    optimizer: Any, strategy: Any = None, *, budget: int | str | None = None, **planning: Any
) -> DistributedOptimizer:
    """An optimizer whose ``minimize`` recomputes as a strategy says, and averages gradients over the processes.

    ::

        strategy = paddle.distributed.fleet.DistributedStrategy()
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": ["hidden"]}     # after remat.paddle.named(hidden, "hidden")
        optimizer = remat.paddle.fleet.distributed_optimizer(paddle.optimizer.Adam(), strategy)
        optimizer.minimize(loss)

    Args:
        optimizer: an optimizer of Paddle.
        strategy: with ``recompute`` and ``recompute_configs["checkpoints"]``, names, since Paddle's strategy takes no
            values: of inputs, of parameters, and of what ``remat.paddle.named`` named.
        budget: as ``plan_program`` takes it, in place of checkpoints.
        **planning: as ``RecomputeOptimizer`` takes it.

    Raises:
        TypeError: for a strategy that is none.
        ValueError: for both a budget and checkpoints.
        UnsupportedStep: for other parts of the strategy that are switched on.
    """
    checkpoints = _checkpoints_of(strategy)
    _refuse_what_is_not_done(strategy)
    return DistributedOptimizer(optimizer, budget, checkpoints, **planning)


class DistributedOptimizer:
    """What ``distributed_optimizer`` returns: ``minimize`` for a static program that every process runs.

    Args:
        inner: an optimizer of Paddle.
        budget: peak bytes of the step.
        checkpoints: values to keep.
        **planning: as ``RecomputeOptimizer`` takes it.
    """

    def __init__(self, inner: Any, budget: int | str | None, checkpoints: Any, **planning: Any) -> None:
        self._inner = inner
        self._recomputes = budget is not None or checkpoints is not None
        self._optimizer = RecomputeOptimizer(inner, budget, checkpoints, **planning) if self._recomputes else inner

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")  # A copy that is being made has none yet.
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    @property
    def plan(self) -> Any:
        """The plan of the program; None where nothing is recomputed."""
        return self._optimizer.plan if self._recomputes else None

    def minimize(self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None) -> Any:
        """Append the backward pass, plan it, average the gradients over the processes, append the update.

        Returns:
            What ``apply_gradients`` of the inner optimizer returns, and the pairs of parameters and gradients.

        Raises:
            UnsupportedStep: outside of static programs.
            InfeasibleBudget: where no schedule fits; it names the smallest budget.
        """
        if paddle.in_dynamic_mode():
            raise UnsupportedStep(
                "remat.paddle.fleet is for static programs (paddle.enable_static()); for a layer in an ordinary loop "
                "wrap what remat.paddle.limit_memory returned in paddle.DataParallel"
            )
        # By position: what paddle.static.amp.decorate returns has another name for the parameters.
        pairs = self._optimizer.backward(loss, startup_program, parameters, no_grad_set)
        processes = dist.get_world_size()
        averaged = []
        for parameter, gradient in pairs:
            if gradient is not None and processes > 1:
                dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
                gradient = gradient / processes
            averaged.append((parameter, gradient))
        return self._inner.apply_gradients(averaged), averaged


def _checkpoints_of(strategy: Any) -> Any:
    if strategy is not None and not hasattr(strategy, "recompute_configs"):
        raise TypeError(
            f"distributed_optimizer takes a paddle.distributed.fleet.DistributedStrategy, not {type(strategy).__name__}"
        )
    if strategy is None or not strategy.recompute:
        return None
    return list(strategy.recompute_configs.get("checkpoints", ()))


def _refuse_what_is_not_done(strategy: Any) -> None:
    others = ("amp", "gradient_merge", "sharding", "pipeline", "localsgd", "dgc", "lars", "lamb", "tensor_parallel")
    on = [name for name in others if strategy is not None and getattr(strategy, name, False) is True]
    if on:
        raise UnsupportedStep(
            f"strategy.{on[0]} is switched on, which remat.paddle.fleet does not do; switch it off, or wrap the inner "
            "optimizer (paddle.static.amp.decorate) before you pass it"
        )
