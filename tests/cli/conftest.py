"""A graph file to plan, and the command line as a function."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner, Result

from remat import Graph
from remat.cli import app
from remat.testing import chain

Run: TypeAlias = Callable[..., Result]
RunScript: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def graph() -> Graph:
    return chain(8, size_bytes=2**20, time_s=1e-3)


@pytest.fixture
def graph_file(graph: Graph, tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    graph.save(path)
    return path


@pytest.fixture
def run() -> Run:
    """Run a command in this process."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


@pytest.fixture
def fails(run: Run) -> Callable[..., str]:
    """Run a command that must fail as a user's mistake does; returns its one line."""

    def fail(*args: object) -> str:
        result = run(*args)
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 2
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("remat: ")
        return lines[0]

    return fail


@pytest.fixture
def run_script() -> RunScript:
    """Run the installed ``remat`` script in a process of its own."""
    script = Path(sys.executable).with_name("remat")
    environment = {name: value for name, value in os.environ.items() if name != "REMAT_TRACEBACK"}

    def run(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            [script, *map(str, args)],
            **{"capture_output": True, "text": True, "timeout": 120, "env": environment, **options},
        )

    return run
