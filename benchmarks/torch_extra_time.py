"""Predicted beside measured extra time in graph mode: ``python -m benchmarks.torch_extra_time [MODEL ...]``.

The models of ``benchmarks.peers.torch_graph_mode``, in the bytes of their checkpointed blocks. The prediction is the
plan's own, with ``device="measured"``. Measured is the median ratio of processor times to graph mode with nothing
recomputed, both in turns, ``ROUNDS`` rounds in each of ``PROCESSES`` processes: where a process happens to put its
memory moves the ratio of steps of small operators by some points. glibc gives free memory back to the system and then
clears it page by page, less of it in a step that needs less: once with that, as it is, and once where it gives nothing
back. With models named, the others keep their lines from before. Writes ``benchmarks/results/torch-extra-time.md`` and
``.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.torch_graph_mode import MODELS, without_draws, wrapped
from remat.running import machine

PROCESSES = 3
ROUNDS = 31
RESULTS = Path(__file__).parent / "results"
TITLE = "PyTorch: predicted and measured extra time in graph mode, in the bytes of checkpointed blocks, one thread"
KEEPING = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
"""Of glibc: free memory stays with the process."""


def line(name: str) -> dict[str, float]:
    """The figures of one process."""
    import remat.torch

    model, loss_of, blocks = without_draws(name)
    loss_of(model).backward()
    model.zero_grad()
    peer = wrapped(model, blocks, False)
    budget = remat.torch.measure(partial(loss_of, peer), repeats=1).peak_bytes
    del peer
    # Two functions, since Dynamo keeps what it captured by the function's code.
    bare = remat.torch.compile(lambda: loss_of(model), budget="100%", backend="aten", device="measured")
    planned = remat.torch.compile(
        lambda: loss_of(model), budget=budget, backend="aten", time_limit_s=4, device="measured"
    )

    def seconds(step: Any) -> float:
        model.zero_grad()
        started = time.process_time()
        step().backward()
        return time.process_time() - started

    for step in (bare, planned, bare, planned):
        seconds(step)
    extra = [seconds(planned) / seconds(bare) - 1 for _ in range(ROUNDS)]
    plan = planned.plan
    assert plan is not None
    return {"predicted": plan.overhead, "measured": statistics.median(extra), "peak_bytes": plan.peak_bytes}


def written(tables: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The table as Markdown."""
    where = machine.described()
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    text = [
        f"# {TITLE}",
        "",
        f"{where['system']} {where['processor']}, {where['cores']} cores; {versions}.",
        "",
        "Medians of the processes, and the least and the most of them. Apart: in points, where memory is kept.",
        "",
        "| model | peak MiB | processes | memory kept: predicted | measured | apart | as it is: predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_memory in tables.items():
        kept, as_is = by_memory["kept"], by_memory["as it is"]
        figures = [_range([one[what] for one in runs]) for runs in (kept, as_is) for what in ("predicted", "measured")]
        middle = [statistics.median(one[what] for one in kept) for what in ("predicted", "measured")]
        figures.insert(2, f"{100 * (middle[1] - middle[0]):+.1f}")
        peak = statistics.median(one["peak_bytes"] for one in kept) / 2**20
        count = f"{len(kept)}, {len(as_is)}"
        text.append(f"| {name} | {peak:.2f} | {count} | {' | '.join(figures)} |")
    return "\n".join(text) + "\n"


def _range(values: list[float]) -> str:
    if not values:
        return ""
    return f"{100 * statistics.median(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f})"


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(line(sys.argv[2])))
        return
    file = RESULTS / "torch-extra-time.json"
    tables = json.loads(file.read_text())["tables"] if file.exists() else {}
    for name in sys.argv[1:] or MODELS:
        command = [sys.executable, "-m", "benchmarks.torch_extra_time", "--one", name]
        found: dict[str, list[dict[str, float]]] = {"as it is": [], "kept": []}
        for _ in range(PROCESSES):
            for memory, more in (("as it is", {}), ("kept", KEEPING)):
                environment = {**os.environ, **more, "REMAT_PLAN_CACHE": "off"}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                found[memory].append(json.loads(done.stdout.splitlines()[-1]))
        tables[name] = found
        tables = {model: tables[model] for model in MODELS if model in tables}
        print(written({name: found}).splitlines()[-1], flush=True)
        file.write_text(json.dumps({"title": TITLE, "tables": tables}, indent=1) + "\n")
        file.with_suffix(".md").write_text(written(tables))


if __name__ == "__main__":
    main()
