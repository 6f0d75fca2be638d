"""The installed ``remat`` script in processes of its own: streams, exit codes and what gets imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import remat

# An entry of None makes an import fail as if the package were not installed.
WITHOUT_FRAMEWORKS = """
import sys
for name in ("tensorflow", "keras", "torch", "jax", "matplotlib", "sklearn"):
    sys.modules[name] = None
from remat.cli import main
main()
"""


def run_without_frameworks(*args):
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_version(run_script):
    result = run_script("--version")

    assert (result.returncode, result.stdout, result.stderr) == (0, f"remat {remat.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_the_commands(run_script, arguments):
    result = run_script(*arguments)

    assert result.returncode == 0
    for command in ("plan", "simulate", "demo"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plam"], "'plan'"),
        (["plan"], "SOURCE"),
        (["plan", "graph.json", "--bugdet", "3"], "--budget"),
        (["plan", "graph.json", "--budget"], "--budget"),
        (["simulate", "none.json"], "none.json"),
        (["plan", "none.json"], "none.json"),
        (["simulate", "a.json", "b.json"], "b.json"),
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(fails, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)

    assert expected in fails(*arguments)


def test_the_script_ends_with_one_line_and_exit_code_2(run_script, tmp_path):
    result = run_script("plam", cwd=tmp_path)

    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("remat: ")
    assert "'plan'" in result.stderr


def test_plan_then_simulate_through_files(run_script, graph_file, tmp_path):
    planned = run_script("plan", graph_file, "--budget", "60%", "--out", tmp_path / "plan.json", "--json")
    simulated = run_script("simulate", graph_file, "--plan", tmp_path / "plan.json", "--json")

    assert (planned.stderr, simulated.stderr) == ("", "")
    assert json.loads(planned.stdout)["peak_bytes"] == json.loads(simulated.stdout)["peak_bytes"]


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def run_in_shell(request):
    """Run ``remat ARGUMENTS REDIRECTION`` in bash; the exit code is that of remat.

    With a buffer, short output is written when the process ends; without one, while the command runs.
    """

    def run(arguments, redirection):
        script = f"{sys.executable} -m remat.cli {arguments} {redirection}; exit ${{PIPESTATUS[0]}}"
        environment = {**os.environ, "PYTHONUNBUFFERED": request.param}
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, env=environment)

    return run


@pytest.mark.parametrize("flag", ["--json", ""], ids=["json", "table"])
def test_reader_that_leaves_early_sees_no_traceback(run_in_shell, graph_file, flag):
    result = run_in_shell(f"simulate {graph_file} {flag}", "| true")

    assert (result.returncode, result.stderr) == (1, "")


def test_closed_stdout_is_no_crash(run_in_shell, graph_file, tmp_path):
    result = run_in_shell(f"plan {graph_file} --budget 1GiB --out {tmp_path / 'plan.json'}", ">&-")

    assert (result.returncode, result.stderr) == (0, "")
    assert remat.load_plan(tmp_path / "plan.json").recomputed == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("flag", ["--json", ""], ids=["json", "table"])
def test_full_disk_is_one_line(run_in_shell, graph_file, flag):
    result = run_in_shell(f"simulate {graph_file} {flag}", ">/dev/full")

    assert (result.returncode, result.stderr) == (2, "remat: No space left on device\n")


def test_graph_file_is_planned_and_simulated_with_no_framework_installed(graph_file):
    planned = run_without_frameworks("plan", graph_file, "--budget", "60%", "--json")
    simulated = run_without_frameworks("simulate", graph_file, "--json")

    assert (planned.returncode, planned.stderr) == (0, "")
    assert (simulated.returncode, simulated.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["plan", "keras.applications:ResNet50"], "tensorflow"),
        (["simulate", "{graph}", "--plot", "memory.png"], "plots"),
        (["demo"], "tensorflow"),
    ],
)
def test_missing_package_is_told_with_the_extra_that_brings_it(graph_file, arguments, extra):
    result = run_without_frameworks(*(argument.format(graph=graph_file) for argument in arguments))

    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert f"remat[{extra}]" in result.stderr


def test_starting_the_command_line_imports_nothing_heavy():
    code = "import sys, remat.cli; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.split()

    assert "typer" in loaded
    assert not {"tensorflow", "keras", "torch", "jax", "matplotlib", "sklearn", "scipy"} & set(loaded)
