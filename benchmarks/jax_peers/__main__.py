"""Plain JAX, ``jax.checkpoint`` with the standard policies, and remat at the same bytes: memory and time.

    python -m benchmarks.jax_peers      # from the project's root; writes benchmarks/results/jax_peers_<platform>.*

Peers and remat are compiled by the same ``remat.jax.jit``; the column "under plain jax.jit" is the temporary memory of
the same function under ``jax.jit`` as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import remat
import remat.jax
from benchmarks.jax_peers.models import Size, transformer
from benchmarks.one_core import stay_on_one_core
from remat.jax.peak import peak_of

RESULTS = Path(__file__).parent.parent / "results"
POLICIES = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}


@dataclass
class Contestant:
    """A compiled method, and its line of the table as far as it is known."""

    line: dict[str, Any]
    compiled: Any
    times_s: list[float] = field(default_factory=list)


def prepared(name: str, gradient: Any, args: Any, expected: Any) -> tuple[Contestant, Any]:
    """Compile a method and compare its gradients; ``expected`` are the plain ones, None for the plain step itself."""
    compiled = remat.jax.jit(lambda *a: gradient(*a)).lower(*args).compile()
    memory = compiled.memory_analysis()
    under_plain_jit = jax.jit(lambda *a: gradient(*a)).lower(*args).compile().memory_analysis().temp_size_in_bytes
    result = jax.block_until_ready(compiled(*args))
    difference = 0.0
    if expected is not None:
        difference = max(
            float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / max(1e-12, float(np.max(np.abs(np.asarray(b))))))
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        )
    line = {
        "name": name,
        "peak_bytes": peak_of(memory),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "plain_jit_temp_bytes": int(under_plain_jit),
        "difference": difference,
    }
    print(f"compiled {name}: temporary {line['temp_bytes'] / 2**20:.1f} MiB", flush=True)
    return Contestant(line, compiled), result


def race(contestants: list[Contestant], args: Any, repeats: int) -> None:
    """Time all methods in turns, so that what else the machine does falls on each of them alike.

    A method's time is given as a ratio: the median over the rounds of its seconds to the plain step's in the same
    round. On a CPU these are seconds of the processor.
    """
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for _ in range(repeats):
        for one in contestants:
            started = clock()
            jax.block_until_ready(one.compiled(*args))
            one.times_s.append(clock() - started)
    plain = contestants[0].times_s
    for one in contestants:
        one.line["time_s"] = min(one.times_s)
        one.line["relative_time"] = statistics.median(a / b for a, b in zip(one.times_s, plain, strict=True))


def smallest(jit: Any, loss: Any, args: Any, time_limit_s: float) -> int:
    """The smallest budget that remat says it can keep under this ``jit``."""
    ours = remat.jax.value_and_grad(loss, budget=1, time_limit_s=time_limit_s)
    try:
        jit(lambda *a: ours(*a)).lower(*args)
    except remat.InfeasibleBudget as error:
        return error.minimum_bytes
    raise AssertionError("a step in one byte")


def compare(size: Size, *, scanned: bool, repeats: int, time_limit_s: float) -> list[dict[str, Any]]:
    """All methods on one model."""
    loss, args = transformer(size, scanned=scanned)
    plain, expected = prepared("plain", jax.value_and_grad(loss), args, None)
    contestants = [plain]
    for name, policy in POLICIES.items():
        peer, _ = transformer(
            size, scanned=scanned, wrap=lambda f, p=policy: jax.checkpoint(f, policy=p, prevent_cse=not scanned)
        )
        contestants.append(prepared(f"jax.checkpoint, {name}", jax.value_and_grad(peer), args, expected)[0])
    peers = [one.line for one in contestants[1:]]
    budgets = {peer["name"].replace("jax.checkpoint, ", "bytes of "): peer["peak_bytes"] for peer in peers}
    budgets["its smallest"] = max(smallest(jit, loss, args, time_limit_s) for jit in (jax.jit, remat.jax.jit))
    unreached = []
    for name, budget in budgets.items():
        ours = remat.jax.value_and_grad(loss, budget=budget, time_limit_s=time_limit_s)
        try:
            one, _ = prepared(f"remat, {name}", ours, args, expected)
            contestants.append(one)
        except remat.InfeasibleBudget as error:
            one_line = {"name": f"remat, {name}", "infeasible": True, "minimum_bytes": error.minimum_bytes}
            unreached.append({**one_line, "budget_bytes": budget})
            continue
        one.line["budget_bytes"] = budget
    race(contestants, args, repeats)
    return [one.line for one in contestants] + unreached


def as_markdown(tables: dict[str, list[dict[str, Any]]], machine: str) -> str:
    """The tables for people."""
    text = [f"# JAX: memory and time beside jax.checkpoint\n\n{machine}\n"]
    for title, lines in tables.items():
        text.append(f"\n## {title}\n")
        text.append("| method | temporary MiB | under plain jax.jit | time to plain | ms | gradient difference |")
        text.append("|---|---|---|---|---|---|")
        for line in lines:
            if line.get("infeasible"):
                text.append(
                    f"| {line['name']} | not reached; smallest peak {line['minimum_bytes'] / 2**20:.1f} | | | | |"
                )
                continue
            text.append(
                f"| {line['name']} | {line['temp_bytes'] / 2**20:.1f} | {line['plain_jit_temp_bytes'] / 2**20:.1f} | "
                f"{line['relative_time']:.2f} | {line['time_s'] * 1e3:.0f} | {line['difference']:.1e} |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15, help="rounds in which all methods take turns")
    parser.add_argument("--time-limit-s", type=float, default=2.0, help="planning, each round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    stay_on_one_core()
    size = Size(layers=options.layers)
    tables = {}
    for title, scanned in (("Unrolled layers", False), ("Scanned layers", True)):
        print(f"{title}: {size}", flush=True)
        tables[title] = compare(size, scanned=scanned, repeats=options.repeats, time_limit_s=options.time_limit_s)
    device = jax.devices()[0]
    whose = "the processor's, on one core" if device.platform == "cpu" else "the clock's"
    machine = (
        f"{size}; float32; {device.device_kind} ({device.platform}), {platform.machine()}, "
        f"JAX {jax.__version__}, Python {platform.python_version()}. Times are {whose}: "
        f"to plain, the median of {options.repeats} rounds in which all methods took turns; in ms, the least."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"jax_peers_{device.platform}"
    target.with_suffix(".json").write_text(json.dumps({"machine": machine, "tables": tables}, indent=1) + "\n")
    target.with_suffix(".md").write_text(as_markdown(tables, machine))
    print(f"wrote {target}.md and .json")


if __name__ == "__main__":
    main()
