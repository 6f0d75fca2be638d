"""Plain JAX, ``jax.checkpoint`` with the standard policies, and remat at the same bytes: memory and processor time.

    python -m benchmarks.jax_peers      # from the project's root; writes benchmarks/results/jax_peers_<platform>.*

Peers and remat are compiled by the same ``remat.jax.jit``; the column "plain jit" is the temporary memory of the same
function under ``jax.jit`` as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import remat
import remat.jax
from benchmarks.jax_peers.models import Size, transformer

RESULTS = Path(__file__).parent.parent / "results"
POLICIES = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}


def seconds(compiled: Any, args: Any, repeats: int) -> tuple[float, float]:
    """The least processor and the least wall seconds of a run."""
    jax.block_until_ready(compiled(*args))
    processor, wall = [], []
    for _ in range(repeats):
        started, started_wall = time.process_time(), time.perf_counter()
        jax.block_until_ready(compiled(*args))
        processor.append(time.process_time() - started)
        wall.append(time.perf_counter() - started_wall)
    return min(processor), min(wall)


def measured(name: str, gradient: Any, args: Any, expected: Any, repeats: int) -> dict[str, Any]:
    """One line of the table; ``expected`` are the plain gradients, None for the plain step itself."""
    jitted = remat.jax.jit(lambda *a: gradient(*a))
    compiled = jitted.lower(*args).compile()
    memory = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    under_plain_jit = jax.jit(lambda *a: gradient(*a)).lower(*args).compile().memory_analysis().temp_size_in_bytes
    result = compiled(*args)
    processor_s, wall_s = seconds(compiled, args, repeats)
    line = {
        "name": name,
        "peak_bytes": int(peak),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "plain_jit_temp_bytes": int(under_plain_jit),
        "processor_s": processor_s,
        "wall_s": wall_s,
        "difference": 0.0,
        "result": result,
    }
    if expected is not None:
        line["difference"] = max(
            float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / max(1e-12, float(np.max(np.abs(np.asarray(b))))))
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        )
    print(
        f"{name:44s} temp {line['temp_bytes'] / 2**20:8.1f} MiB, plain jit {under_plain_jit / 2**20:8.1f}, "
        f"processor {processor_s * 1e3:7.0f} ms, difference {line['difference']:.1e}",
        flush=True,
    )
    return line


def compare(size: Size, *, scanned: bool, repeats: int, time_limit_s: float) -> list[dict[str, Any]]:
    """All methods on one model."""
    loss, args = transformer(size, scanned=scanned)
    plain = measured("plain", jax.value_and_grad(loss), args, None, repeats)
    expected = plain.pop("result")
    lines = [plain]
    for name, policy in POLICIES.items():
        peer, _ = transformer(
            size, scanned=scanned, wrap=lambda f, p=policy: jax.checkpoint(f, policy=p, prevent_cse=not scanned)
        )
        lines.append(measured(f"jax.checkpoint, {name}", jax.value_and_grad(peer), args, expected, repeats))
    budgets = {line["name"].replace("jax.checkpoint, ", "bytes of "): line["peak_bytes"] for line in lines[1:]}
    try:
        jax.jit(remat.jax.value_and_grad(loss, budget=1, time_limit_s=time_limit_s)).lower(*args)
    except remat.InfeasibleBudget as error:
        budgets["its smallest"] = error.minimum_bytes
    for name, budget in budgets.items():
        ours = remat.jax.value_and_grad(loss, budget=budget, time_limit_s=time_limit_s)
        try:
            line = measured(f"remat, {name}", ours, args, expected, repeats)
        except remat.InfeasibleBudget as error:
            line = {"name": f"remat, {name}", "infeasible": True, "minimum_bytes": error.minimum_bytes}
            print(f"{line['name']:44s} not reached: the smallest is {error.minimum_bytes / 2**20:.1f} MiB", flush=True)
        line["budget_bytes"] = budget
        lines.append(line)
    for line in lines:
        line.pop("result", None)
    return lines


def as_markdown(tables: dict[str, list[dict[str, Any]]], machine: str) -> str:
    """The tables for people."""
    text = [f"# JAX: memory and time beside jax.checkpoint\n\n{machine}\n"]
    for title, lines in tables.items():
        text.append(f"\n## {title}\n")
        text.append("| method | temporary MiB | under plain jax.jit | processor ms | wall ms | gradient difference |")
        text.append("|---|---|---|---|---|---|")
        for line in lines:
            if line.get("infeasible"):
                text.append(
                    f"| {line['name']} | not reached; smallest peak {line['minimum_bytes'] / 2**20:.1f} | | | | |"
                )
                continue
            text.append(
                f"| {line['name']} | {line['temp_bytes'] / 2**20:.1f} | {line['plain_jit_temp_bytes'] / 2**20:.1f} | "
                f"{line['processor_s'] * 1e3:.0f} | {line['wall_s'] * 1e3:.0f} | {line['difference']:.1e} |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit-s", type=float, default=2.0, help="planning, each round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    size = Size(layers=options.layers)
    tables = {}
    for title, scanned in (("Unrolled layers", False), ("Scanned layers", True)):
        print(f"{title}: {size}", flush=True)
        tables[title] = compare(size, scanned=scanned, repeats=options.repeats, time_limit_s=options.time_limit_s)
    device = jax.devices()[0]
    machine = (
        f"{size}; float32; {device.device_kind} ({device.platform}), {platform.machine()}, "
        f"JAX {jax.__version__}, Python {platform.python_version()}; least of {options.repeats} runs."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"jax_peers_{device.platform}"
    target.with_suffix(".json").write_text(json.dumps({"machine": machine, "tables": tables}, indent=1) + "\n")
    target.with_suffix(".md").write_text(as_markdown(tables, machine))
    print(f"wrote {target}.md and .json")


if __name__ == "__main__":
    main()
