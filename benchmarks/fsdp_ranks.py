"""What each of 2, 4 and 8 ranks of FSDP needs, predicted and then run: ``python -m benchmarks.fsdp_ranks``.

The prediction is ``plan_mesh``'s: the model on the meta device, the ranks simulated. The run is that of so many real
processes with gloo on the CPU, which measure a whole step with its update. Writes ``benchmarks/results/fsdp-ranks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remat.running import machine

RESULT = Path(__file__).parent / "results" / "fsdp-ranks.md"
RANKS = (2, 4, 8)
STEPS = 5
WIDTH, BLOCKS, ROWS = 128, 8, 512  # Samples of one rank.
CASES = {
    "each block, gathered again": {"reshard": True},
    "each block, kept gathered": {"reshard": False},
    "each block, bfloat16": {"reshard": True, "dtype": "bfloat16"},
    "each block, in two replicas (HSDP)": {"reshard": True, "replicas": 2},
}


def model() -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    return nn.Sequential(nn.Sequential(*[Block() for _ in range(BLOCKS)]), nn.Linear(WIDTH, 16))


def mesh(ranks: int, case: dict[str, Any]) -> str:
    replicas = case.get("replicas", 1)
    return f"data={replicas},fsdp={ranks // replicas}" if replicas > 1 else f"fsdp={ranks}"


def predicted(ranks: int, case: dict[str, Any]) -> tuple[int, float]:
    """Bytes of each rank at the peak of the plain step, and the seconds that it took to say so."""
    import torch
    from torch import nn

    import remat.torch

    def build(samples: int) -> tuple[Callable[..., Any], Any, Any]:
        with torch.device("meta"):
            module, x, y = model(), torch.empty(samples, WIDTH), torch.empty(samples, dtype=torch.int64)
        return lambda x, y: nn.functional.cross_entropy(module(x).float(), y), x, y

    began = time.monotonic()
    found = remat.torch.plan_mesh(
        build,
        mesh(ranks, case),
        device="cpu",
        budget="8GiB",
        batch_size=ROWS * ranks,
        mixed_precision=case.get("dtype"),
        reshard_after_forward=case["reshard"],
    )
    assert found.plan is not None
    assert found.plan.recomputed == 0
    return found.plan.peak_bytes, time.monotonic() - began


def measured(rank: int, ranks: int, case: dict[str, Any]) -> list[int]:
    """Bytes at the peak of each of several steps in this process, one of several."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import remat.torch

    torch.manual_seed(0)
    module, replicas = model(), case.get("replicas", 1)
    shape, names = ((replicas, ranks // replicas), ("data", "fsdp")) if replicas > 1 else ((ranks,), ("fsdp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "dtype" in case else MixedPrecisionPolicy()
    given: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "mp_policy": policy}
    for unit in (*module[0], module[1]):
        fully_shard(unit, reshard_after_forward=case["reshard"], **given)
    fully_shard(module, **given)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(16, (ROWS,))

    def step() -> None:
        nn.functional.cross_entropy(module(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return [remat.torch.measure(step, repeats=1).peak_bytes for _ in range(STEPS)]


def worker(rank: int, ranks: int, store: str, name: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    print(json.dumps(measured(rank, ranks, CASES[name])), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, name: str) -> list[int]:
    """What so many processes measured, each in several steps."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.fsdp_ranks",
                    "--worker",
                    str(rank),
                    str(ranks),
                    f"{folder}/store",
                    name,
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]
        found = [process.communicate(timeout=600)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes)
    return [peak for text in found for peak in json.loads(text.splitlines()[-1])]


def rows(most: int) -> Iterator[str]:
    for name, case in CASES.items():
        for ranks in RANKS:
            if ranks == case.get("replicas"):
                continue
            bytes_, seconds = predicted(ranks, case)
            measurements = run(ranks, name) if ranks <= most else []
            least, largest = (min(measurements), max(measurements)) if measurements else (None, None)
            errors = [one / bytes_ - 1 for one in (least, largest) if one is not None]
            said = " to ".join(dict.fromkeys(f"{error:+.3%}" for error in errors)) or "not run"
            seen = "" if least is None else " to ".join(dict.fromkeys(f"{one:,}" for one in (least, largest)))
            line = f"| {name} | {mesh(ranks, case)} | {bytes_:,} | {seen} | {said} | {seconds:.1f} |"
            print(line, flush=True)
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=4)
    parser.add_argument("--most", type=int, default=max(RANKS), help="run no more processes than this")
    options = parser.parse_args()
    if options.worker:
        rank, ranks, store, name = options.worker
        worker(int(rank), int(ranks), store, name)
        return
    table = list(rows(options.most))
    where = machine.described()
    head = f"""# FSDP: what each rank needs, predicted by one process and measured in as many as there are ranks

{where["system"]}, {where["cores"]} cores; gloo, one thread a process. {BLOCKS} blocks of {WIDTH}, {ROWS} samples each,
AdamW. Bytes at the peak of a whole step, the least and the most of all ranks in {STEPS} steps each. Error: measured
against predicted. What is measured above it is what gloo's own threads still held: copies that it makes of what it
reduces, and lets go of when they get to it.

| sharded by | mesh | predicted | measured | error | seconds to predict |
|---|---|---|---|---|---|
"""
    RESULT.write_text(head + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
