"""What a user gets from the package index: a wheel and a source archive that hold all of remat and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from snippets import ROOT, snippets

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "remat").rglob("*.py")}
PAGE = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "remat" / "report" / "page").iterdir()}
README = {snippet.framework: snippet for snippet in snippets(ROOT / "README.md")}
EXTRA_OF = {"keras": "tensorflow"}
"""The extra that a snippet of the README needs, where it is not named like the framework."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built from a copy: a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("distribution")
    copy = folder / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy), cwd=folder)
    return folder / "dist"


def _run(*command: str, cwd: Path) -> str:
    # What is imported must be what is installed there, not this checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(_wheel(built)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == SOURCES | PAGE | {"remat/py.typed"}


def test_the_source_archive_holds_what_a_wheel_is_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames() if not name.endswith("/")}
    assert {f"src/{name}" for name in SOURCES | PAGE} | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_wheel_says_what_the_project_says(built: Path) -> None:
    with zipfile.ZipFile(_wheel(built)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert metadata.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])
    assert "make test" in metadata.get_payload()


def test_the_installed_wheel_plans_and_reports(built: Path, tmp_path: Path) -> None:
    """Outside of the checkout, with the libraries that are here; no framework takes part."""
    site = tmp_path / "site"
    _run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(_wheel(built)),
        cwd=tmp_path,
    )
    printed = _run(
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import remat, remat.report\n"
        "graph = remat.testing.chain(20)\n"
        "plan = remat.plan(graph, '60%', planner='sqrt_n')\n"
        "remat.report.Report(graph, plan).save('page.html')\n"
        "print(remat.__file__, plan.recomputed)\n",
        cwd=tmp_path,
    )
    file, recomputed = printed.split()
    assert Path(file).is_relative_to(site)
    assert int(recomputed) > 0
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("framework", sorted(README))
def test_the_readme_runs_with_the_wheel_and_one_extra(framework: str, built: Path, tmp_path: Path) -> None:
    """In an environment with nothing but the wheel and the extra of that framework, outside of the checkout.

    Versions are those that the project pins; of PyTorch and TensorFlow the CPU builds, where there are some.
    """
    extra = EXTRA_OF.get(framework, framework)
    _run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = (python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    if extra == "tensorflow" and _pinned("tensorflow-cpu"):
        # The full build, with what a GPU needs, takes the place of the CPU build in a user's environment.
        _run(*install, "tensorflow-cpu", "keras", str(_wheel(built)), cwd=tmp_path)
    else:
        _run(*install, f"{_wheel(built)}[{extra}]", cwd=tmp_path)
    (tmp_path / "snippet.py").write_text(README[framework].code)
    assert re.search(r"recomputed +[1-9]|tf\.Tensor", _run(python, "snippet.py", cwd=tmp_path))


def _pinned(name: str) -> bool:
    return re.search(rf"^{re.escape(name)}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE) is not None
