"""A GPT-2 shaped Transformer of six unrolled layers; ``remat.jax.jit`` compiles every line, which helps the peers."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.tensorflow_methods import budget_of

TITLE = "JAX: a GPT-2 shaped Transformer of 6 layers, 16 x 128 tokens, value and gradient"
METHODS = (
    "plain",
    "jax.checkpoint, dots_saveable",
    "jax.checkpoint, nothing_saveable",
    "remat, bytes of nothing_saveable",
    "remat, 50 % of plain",
    "remat, its smallest",
)


def run(method: str, small: bool, earlier: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Peak bytes, seconds and gradients of one method."""
    import jax

    import remat
    import remat.jax
    from benchmarks.jax_peers.models import Size, transformer

    size = Size(layers=2, batch=4) if small else Size()
    wrap: Any = lambda layer: layer  # noqa: E731
    if method.startswith("jax.checkpoint"):
        policy = getattr(jax.checkpoint_policies, method.rpartition(" ")[2])
        wrap = lambda layer: jax.checkpoint(layer, policy=policy)  # noqa: E731
    loss, args = transformer(size, scanned=False, wrap=wrap)

    def smallest() -> int:
        try:
            jax.jit(remat.jax.value_and_grad(loss, budget=1)).lower(*args)
        except remat.InfeasibleBudget as error:
            return error.minimum_bytes
        return 1

    budget = budget_of(method, earlier, "jax.checkpoint, nothing_saveable", smallest)
    gradient = jax.value_and_grad(loss) if budget is None else remat.jax.value_and_grad(loss, budget=budget)
    step = remat.jax.jit(lambda *a: gradient(*a))
    found = remat.jax.measure(step, *args, repeats=5)
    return {"peak_bytes": found.peak_bytes, "step_s": found.time_s}, jax.tree.leaves(step(*args)[1])
