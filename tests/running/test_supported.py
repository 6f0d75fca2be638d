"""The ranges of versions: what a front end refuses, and that pyproject.toml and the documentation say the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import remat
from remat.running.supported import FRAMEWORKS, JAX, KERAS, PADDLE, TENSORFLOW, TORCH

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("2.8.1", False),
        ("2.9.0", True),
        ("2.13.0+cpu", True),
        ("2.15.3", True),
        ("2.16.0a0+git1234", False),
        ("3.9.0", False),
        ("nightly", False),
    ],
)
def test_a_range_holds_its_ends_and_their_patches(version, has):
    assert TORCH.has(version) == has


def test_pyproject_allows_what_was_tried():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(extras["tensorflow"]) == {TENSORFLOW.requirement, KERAS.requirement}
    assert extras["jax"] == [JAX.requirement]
    assert extras["torch"] == [TORCH.requirement]
    assert extras["paddle"] == [PADDLE.requirement]


def test_the_pinned_versions_are_in_range():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)

    for framework in FRAMEWORKS:
        assert framework.has(pins[framework.packages[0]]), framework.name


def import_with_fake(
    front_end: str, folder: Path, version: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Import a front end of remat where its framework is an empty package of some version."""
    package = folder / front_end.rpartition(".")[2]
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import {front_end}"
    variables = {name: value for name, value in os.environ.items() if name != "REMAT_ANY_VERSION"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PYTHONPATH": str(Path(remat.__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("framework", [one for one in FRAMEWORKS if one.imported_by], ids=lambda one: one.name)
@pytest.mark.parametrize("version", ["0.1.0", "99.0.0"])
def test_a_front_end_refuses_other_versions_in_one_line(framework, version, tmp_path):
    done = import_with_fake(framework.imported_by, tmp_path, version)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"remat.core.errors.UnsupportedVersion: {framework.imported_by} supports {framework.name} {framework.range}, "
        f"and {version} is installed: pip install '{framework.requirement}', or set REMAT_ANY_VERSION=1 to try this one"
    )


def test_a_version_out_of_range_can_be_tried(tmp_path):
    done = import_with_fake("remat.torch", tmp_path, "99.0.0", REMAT_ANY_VERSION="1")

    # It gets as far as the first symbol that an empty package does not have.
    assert done.returncode == 1
    assert "UnsupportedVersion" not in done.stderr


def test_a_refusal_is_an_import_error():
    assert issubclass(remat.UnsupportedVersion, ImportError)
    assert issubclass(remat.UnsupportedVersion, remat.RematError)
