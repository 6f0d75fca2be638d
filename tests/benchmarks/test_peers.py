"""The tables beside the peers can be made again: a small model, every method in its own process."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peers.tensorflow_methods import RECOMPUTE
from benchmarks.peers.tensorflow_turns import REMAT, written

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["tensorflow", "jax", "torch", "paddle"])
def test_tables_are_written_whole(framework: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--small", "--frameworks", framework, "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, env={**os.environ})
    assert done.returncode == 0, done.stderr

    table = json.loads((tmp_path / f"peers-{framework}.json").read_text())
    lines = {line["method"]: line for line in table["lines"]}
    plain = lines["plain"]
    ours = [line for name, line in lines.items() if name.startswith("remat")]
    assert len(ours) >= 3
    # What the peers reach on a small model is not always within reach.
    ran = [line for line in ours if "error" not in line]
    assert len(ran) >= 3, ours
    assert all("smallest budget" in line["error"] for line in ours if "error" in line), ours
    assert all(line["difference"] < 1e-4 for line in ran), ran
    assert all(line["peak_bytes"] < plain["peak_bytes"] for line in ran), ran
    assert "remat" in table["versions"]
    text = (tmp_path / f"peers-{framework}.md").read_text()
    assert all(f"| {name} |" in text for name in lines)
    assert (tmp_path / f"peers-{framework}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_three_steps_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers.tensorflow_turns", "--one", "--small"]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr

    run = json.loads(done.stdout.splitlines()[-1])
    plain, recomputed, ours = (run["peaks"][name] for name in ("plain", RECOMPUTE, REMAT))
    # What the peer reaches on a small model is not always within reach.
    assert ours <= run["budget"]
    assert max(recomputed, ours) < plain
    assert set(run["wall"]) == set(run["processor"]) == {"plain", RECOMPUTE, REMAT}
    line = written([run]).splitlines()[-1].split(" | ")
    assert line[0] == "| 1"
    assert line[3].split(" (refused below ")[0] == f"{ours / 2**20:.1f}"
    assert line[-1] == f"{run['processor'][REMAT]:.2f} |"


def imports(path: Path) -> list[tuple[str, str]]:
    """The module and the name of each import from remat."""
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return [
        (node.module, alias.name)
        for node in found
        if node.module is not None and node.module.partition(".")[0] == "remat"
        for alias in node.names
    ]


BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def test_benchmarks_import_what_is_there() -> None:
    """Nobody runs them often: a module that moved would be noticed late."""
    for path in BENCHMARKS:
        for module, name in imports(path):
            source = ROOT / "src" / Path(*module.split("."))
            if (source / f"{name}.py").exists():
                continue
            file = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
            assert file.exists(), f"{path.name}: {module}"
            defined = re.search(
                rf"^(def|class) {name}\b|^{name}\b.*=|import.*\b{name}\b", file.read_text(), re.MULTILINE
            )
            assert defined, f"{path.name}: {module}.{name}"
    assert sum(len(imports(path)) for path in BENCHMARKS) >= 10
