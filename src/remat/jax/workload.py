"""A JAX function as a training step to plan, run and check: for the command line and ``remat.jax.check``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from remat.core.graph import Graph
from remat.jax.api.jit import jit as planned_jit
from remat.jax.measure import measure
from remat.jax.trace.graph import graph_of_program, label_graph
from remat.jax.trace.program import program_of, telling_of_cudnn, trace_jaxpr
from remat.running.check import CheckResult, check_workload
from remat.running.cost_model import get_profile
from remat.running.workload import Array, NotAStep, StepOptions, Training, Workload, nudge

_SEED: Final = 11
"""Draws the arrays in place of shapes, so that a plain and a planned run get the same ones. Any number will do."""


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


def make_workload(made: tuple[Any, ...], options: StepOptions) -> Workload:
    """The training step of ``(function, *arguments)``.

    The function is a loss, differentiated with respect to its first argument, the parameters; or, with
    ``options.whole_step``, a whole step whose first argument are the parameters and whose second is the optimizer's
    state. Arguments are pytrees of arrays or ``jax.ShapeDtypeStruct``.

    Raises:
        NotAStep: for a function that returns no scalar where a loss is wanted.
    """
    function, *args = made
    options.refuse("JAX", "inputs", "loss", "optimizer")
    if not options.whole_step:
        _check_is_loss(function, args)
    return JaxFunction(function, args, options)


class JaxFunction:
    """See ``remat.running.workload.Workload``; a step is one call of the compiled gradient, or of the whole step.

    Args:
        function: a loss, or a whole step.
        args: its arguments.
        options: whether it is a whole step.
    """

    framework = "jax"

    def __init__(self, function: Callable[..., Any], args: list[Any], options: StepOptions) -> None:
        self._args = args
        self._options = options
        self._step: Callable[..., Any] = function if options.whole_step else jax.value_and_grad(function)

    @property
    def batch_size(self) -> int | None:
        """What the user said; the arguments alone know."""
        return self._options.batch_size

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        closed, _ = trace_jaxpr(lambda *args: self._step(*args), self._args)
        program = program_of(closed)
        roles = [self._role(number) for number, arg in enumerate(self._args) for _ in jax.tree.leaves(arg)]
        return label_graph(graph_of_program(program, get_profile(device)), program, roles)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run the step ``steps`` times on the same arguments; a function of JAX keeps nothing in between."""
        args = self._arguments(nudged)
        step: Any = planned_jit(lambda *a: self._step(*a), budget=budget)
        measured = measure(step, *args, repeats=steps)
        result = step(*args)
        loss, values = (float("nan"), result) if self._options.whole_step else (float(result[0]), {})
        named = {f"weight/{name}": value for name, value in _named(values).items()}
        plan = None if budget is None else step.plan
        graph = None if budget is None else step.graph
        losses = () if self._options.whole_step else (loss,) * steps
        return Training(measured.peak_bytes, measured.time_s, losses, named, plan, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """The gradients of the parameters; a whole step does not give them out."""
        if self._options.whole_step:
            return {}
        step: Any = planned_jit(lambda *a: self._step(*a), budget=budget)
        return {f"gradient/{name}": value for name, value in _named(step(*self._arguments(nudged))[1]).items()}

    def restore(self) -> None:
        """Nothing was changed: functions of JAX have no state."""

    def _role(self, number: int) -> str:
        if number == 0:
            return "parameter"
        return "optimizer_state" if number == 1 and self._options.whole_step else "batch"

    def _arguments(self, nudged: bool) -> list[Any]:
        """Arrays; random ones in the place of shapes."""
        random = np.random.default_rng(_SEED)
        args = jax.tree.map(lambda leaf: _array(leaf, random), self._args)
        if nudged:
            args[0] = jax.tree.map(lambda leaf: jnp.asarray(nudge(np.asarray(leaf), random)), args[0])
        return list(args)


def _check_is_loss(function: Callable[..., Any], args: list[Any]) -> None:
    name = getattr(function, "__name__", repr(function))
    with telling_of_cudnn():
        result = jax.eval_shape(function, *args)
    leaves = jax.tree.leaves(result)
    if len(leaves) == 1 and leaves[0].shape == () and jnp.issubdtype(leaves[0].dtype, jnp.floating):
        return
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]) or "nothing"
    raise NotAStep(
        f"the function {name!r} returns {shown}{', ...' if len(leaves) > 3 else ''}, no loss: a loss is one "
        "floating-point number. Return the mean or the sum of it, or say --step if this is a whole training step"
    )


def _array(leaf: Any, random: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)
    return jnp.asarray(random.integers(0, 2, leaf.shape), leaf.dtype)


def _named(tree: Any) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
