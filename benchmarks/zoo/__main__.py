"""Every model of the zoo, each in its own process; goes on where it was stopped.

    python -m benchmarks.zoo [--frameworks jax,torch] [--only gru,decoder] [--again]   # from the project's root
    python -m benchmarks.zoo --frameworks jax --tables                                 # written anew, nothing measured

Writes ``benchmarks/results/zoo-<framework>.json`` after each model, and ``.md`` and ``.png`` of it. A model that stands
in the file is left out, unless ``--again`` is given or other versions are installed. What is to be known of rows that
were measured in another way stands in the file under "notes", by hand. Models of timm, torchvision, diffusers and
keras-hub need these packages: ``torch/vision.py``, ``torch/diffusion.py`` and ``keras/hub.py`` say which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.where import in_a_line
from benchmarks.zoo.frame import scatter
from benchmarks.zoo.frame.subject import environment_of, models_of
from benchmarks.zoo.frame.table import as_markdown, summary
from remat.running import machine

RESULTS = Path(__file__).parent.parent / "results"
FRAMEWORKS = ("jax", "torch", "torch-eager", "keras-tensorflow", "keras-jax", "keras-torch")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="between commas")
    parser.add_argument("--only", default="", help="models, between commas; all by default")
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    parser.add_argument("--tables", action="store_true", help="measure nothing: write .md and .png of what is on disk")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for framework in options.frameworks.split(","):
        if options.tables:
            _write_tables(framework, json.loads((options.out / f"zoo-{framework}.json").read_text()), options.out)
            continue
        names = list(models_of(framework))
        wanted = options.only.split(",") if options.only else names
        if unknown := sorted(set(wanted) - set(names)):
            parser.error(f"no model of {framework} is called {', '.join(unknown)}; there are {', '.join(names)}")
        table = _opened(options.out / f"zoo-{framework}.json")
        for name in wanted:
            if name in table["records"] and not options.again:
                continue
            print(f"{framework} {name}", flush=True)
            table["records"][name] = run(framework, name, options.limit)
            _write(framework, table, options.out)
        _write(framework, table, options.out)
        print(summary(list(table["records"].values())), flush=True)


def run(framework: str, name: str, limit_s: float) -> dict[str, Any]:
    """Measure one model in a fresh process; where that fails, how it failed is the record."""
    command = [sys.executable, "-m", "benchmarks.zoo.frame.worker", framework, name]
    surroundings = os.environ | environment_of(framework)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False, env=surroundings
        )
    except subprocess.TimeoutExpired:
        return {"model": name, "error": f"took more than {limit_s:g} s"}
    if done.returncode:
        return {"model": name, "error": f"exit code {done.returncode}"}
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def _opened(path: Path) -> dict[str, Any]:
    versions = machine.versions()
    if path.exists():
        table: dict[str, Any] = json.loads(path.read_text())
        if table["versions"] == versions:
            return table
    return {"machine": machine.described(), "versions": versions, "records": {}}


def _write(framework: str, table: dict[str, Any], out: Path) -> None:
    (out / f"zoo-{framework}.json").write_text(json.dumps(table, indent=1) + "\n")
    _write_tables(framework, table, out)


def _write_tables(framework: str, table: dict[str, Any], out: Path) -> None:
    """The page and the picture; models stand in the zoo's own order, those that it no longer has are left out."""
    line = " ".join([f"{in_a_line(table['machine'], table['versions'])}.", *table.get("notes", [])])
    records = [table["records"][name] for name in models_of(framework) if name in table["records"]]
    target = out / f"zoo-{framework}"
    target.with_suffix(".md").write_text(as_markdown(framework, records, line))
    if found := scatter.predictions(records):
        scatter.draw(found, f"Plans of the zoo: {framework}", target.with_suffix(".png"))


if __name__ == "__main__":
    main()
