"""Every table beside the peers, made again by one command: memory, time and gradients, each line in its own process.

    python -m benchmarks.peers [--frameworks tensorflow,jax,torch,paddle] [--small]   # from the project's root

Writes ``benchmarks/results/peers-<framework>.md``, ``.json`` and ``.png``. All lines of a table are of the same model
from the same weights on the same batch; "difference" is the largest difference of a gradient from the plain one's,
relative to the largest gradient. A peer that cannot run the model stands there with its error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.where import in_a_line
from remat.running import machine

RESULTS = Path(__file__).parent.parent / "results"
FRAMEWORKS = ("tensorflow", "jax", "torch", "paddle")
TIME_LIMIT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="between commas")
    parser.add_argument("--small", action="store_true", help="a small model: a check that it works, not a result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for framework in options.frameworks.split(","):
        module = importlib.import_module(f"benchmarks.peers.{framework}_methods")
        print(f"{module.TITLE}", flush=True)
        table = {
            "title": module.TITLE,
            "small": options.small,
            "machine": machine.described(),
            "versions": machine.versions(),
            "lines": measured(framework, module.METHODS, options.small),
        }
        write(table, options.out / f"peers-{framework}")
        print(f"wrote {options.out}/peers-{framework}.md, .json and .png", flush=True)


def measured(framework: str, methods: tuple[str, ...], small: bool) -> list[dict[str, Any]]:
    """One line for each method; later ones are told the peaks of earlier ones."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for method in methods:
            line = run(framework, method, small, lines, Path(name))
            lines.append(line)
            print(as_row(line), flush=True)
    return lines


def run(framework: str, method: str, small: bool, lines: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run one method in a fresh process; what it raises is its result."""
    gradients = folder / f"{len(lines)}.npz"
    request = {"method": method, "small": small, "lines": lines, "gradients": str(gradients)}
    command = [sys.executable, "-m", "benchmarks.peers.worker", framework, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"method": method, "error": said[-1][:300] if said else f"exit code {done.returncode}"}
    line = {"method": method, **json.loads(done.stdout.splitlines()[-1])}
    if gradients.exists():
        line["difference"] = difference(folder / "0.npz", gradients)
    return line


def difference(plain_file: Path, other_file: Path) -> float:
    """The largest difference, relative to the largest plain gradient."""
    with np.load(plain_file) as plain, np.load(other_file) as other:
        largest = max(float(np.max(np.abs(plain[name]))) for name in plain.files)
        return max(float(np.max(np.abs(plain[name] - other[name]))) for name in plain.files) / largest


HEAD = "| method | peak MiB | step ms | against plain | difference |\n|---|---|---|---|---|"


def as_row(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"| {line['method']} | fails: {line['error'].replace('|', '/')} | | | |"
    figures = [f"{line['peak_bytes'] / 2**20:.1f}", f"{line['step_s'] * 1e3:.0f}", f"{line['relative_time']:.2f} x"]
    return f"| {line['method']} | {' | '.join(figures)} | {line['difference']:.1e} |"


def write(table: dict[str, Any], target: Path) -> None:
    text = [
        f"# {table['title']}",
        "",
        f"{in_a_line(table['machine'], table['versions'])}."
        + (" A small model, to see that it works." if table["small"] else ""),
        "",
        HEAD,
        *map(as_row, table["lines"]),
    ]
    target.with_suffix(".md").write_text("\n".join(text) + "\n")
    target.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    picture(table, target.with_suffix(".png"))


def picture(table: dict[str, Any], path: Path) -> None:
    """Step time against peak: what lies below and to the left is better."""
    from matplotlib.figure import Figure

    from remat.report.plots import save_figure

    figure = Figure(figsize=(11, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for number, line in enumerate(table["lines"], start=1):
        if "error" not in line:
            ours = line["method"].startswith("remat")
            x, y = line["peak_bytes"] / 2**20, line["relative_time"]
            style = {"marker": "o" if ours else "s", "color": "#0072B2" if ours else "#E69F00", "markersize": 8}
            axes.plot(x, y, linestyle="", label=f"{number}  {line['method']}", **style)
            axes.annotate(str(number), (x, y), xytext=(5, 5), textcoords="offset points", fontsize="small")
    axes.set(xlabel="peak (MiB)", ylabel="step against plain")
    axes.margins(x=0.1, y=0.1)
    axes.set(xlim=(0, None), ylim=(0, None))
    figure.suptitle(table["title"])
    figure.legend(loc="outside right center", fontsize="small")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
