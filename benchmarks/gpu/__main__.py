"""Checks and measures remat on the GPU at hand, for each framework that sees it: ``make gpu``.

    python -m benchmarks.gpu [--parts exact,budgets,training] [--frameworks torch,jax]
    python -m benchmarks.gpu --device cpu --small      # a check that it works, on a machine without a GPU

Writes ``benchmarks/results/gpu-NAME.md``, ``.json`` and ``.png``. Each case is a process of its own, and its lines
are kept as they come: a run that was cut off goes on where it stopped, unless ``--fresh`` is given. A part ends after
``--limit-s`` seconds; what it had no time for is listed as skipped. The part "library" has models of timm, torchvision
and diffusers: ``benchmarks/zoo/torch`` says which packages, and without one its models are lines that say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import PARTS, UNTIMED, Case, cases_of
from benchmarks.gpu.tables import write
from remat.running import machine

RESULTS = Path(__file__).parent.parent / "results"
FRAMEWORKS = ("torch", "jax")
LEAST_TIME_OF_A_CASE_S = 20
"""Less is not enough to import a framework, so a case is not begun."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="between commas")
    parser.add_argument("--frameworks", default=",".join(f for f in FRAMEWORKS if find_spec(f)), help="between commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small models: a check that it works, not a result")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds a part may take")
    parser.add_argument("--name", help="of the result; the name of the device where none is given")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time, in parts where nothing is timed")
    parser.add_argument("--only", default="", help="cases whose name contains one of these, between commas")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device_name = name_of_device(options.device)
    target = options.out / f"gpu-{options.name or device_name.lower().replace(' ', '-')}"
    options.out.mkdir(parents=True, exist_ok=True)
    found = {} if options.fresh else known(target.with_suffix(".json"))
    skipped: list[str] = []
    for part in options.parts.split(","):
        if part not in PARTS:
            sys.exit(f"there is no part {part!r}; choose from {', '.join(PARTS)}")
        ends = time.monotonic() + options.limit_s
        due = [
            case
            for case in cases_of(part, options.frameworks.split(","))
            if any(one in case.key for one in options.only.split(",")) and not is_whole(found.get(case.key))
        ]
        run = partial(run_until, ends, options.device, options.small)
        with ThreadPoolExecutor(options.jobs if part in UNTIMED else 1) as pool:
            running = {pool.submit(run, case): case for case in due}
            for done in as_completed(running):
                lines, key = done.result(), running[done].key
                if lines is None:
                    skipped.append(key)
                    continue
                found[key] = lines
                write(target, summary(device_name, options.small, found, skipped))
    write(target, summary(device_name, options.small, found, skipped))
    print(f"wrote {target}.md, .json and .png" + (f"; skipped for time: {', '.join(skipped)}" if skipped else ""))


def run_until(ends: float, device: str, small: bool, case: Case) -> list[dict[str, Any]] | None:
    """The lines of a case that ends by then; None where too little time is left to begin it."""
    left_s = ends - time.monotonic()
    if left_s < LEAST_TIME_OF_A_CASE_S:
        return None
    print(case.key, flush=True)
    return list(lines_of(case, device, small, left_s))


def lines_of(case: Case, device: str, small: bool, limit_s: float) -> Iterator[dict[str, Any]]:
    """The lines of a case, run in a fresh process; what stops it is the last of them."""
    size = "small" if small else "full"
    command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(dataclasses.asdict(case)), device, size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        printed, said, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as stopped:
        printed, said, code = _text(stopped.stdout), "", None
    for line in printed.splitlines():
        if line.startswith("{"):
            print("   ", line[:200], flush=True)
            yield json.loads(line)
    if code is None:
        yield {"name": "stopped", "error": f"it took more than the {limit_s:.0f} s that were left"}
    elif code:
        last = [line for line in said.splitlines() if line.strip() and not line.startswith("frame #")]
        yield {"name": "stopped", "error": last[-1][:300] if last else f"exit code {code}"}


def _text(printed: bytes | str | None) -> str:
    return printed.decode() if isinstance(printed, bytes) else printed or ""


def known(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of an earlier run, by case."""
    return dict(json.loads(path.read_text())["cases"]) if path.exists() else {}


def is_whole(lines: Sequence[dict[str, Any]] | None) -> bool:
    """Was a case run to its end?"""
    return bool(lines) and lines is not None and lines[-1]["name"] != "stopped"


def summary(device: str, small: bool, found: dict[str, Any], skipped: Sequence[str]) -> dict[str, Any]:
    return {
        "device": device,
        "small": small,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.described(),
        "versions": machine.versions(),
        "skipped": list(skipped),
        "cases": found,
    }


def name_of_device(device: str) -> str:
    """As the driver names it.

    Raises:
        SystemExit: where there is no such device.
    """
    if device == "cpu":
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        sys.exit("there is no CUDA device here (nvidia-smi names none); try --device cpu --small")


if __name__ == "__main__":
    main()
