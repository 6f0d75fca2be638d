"""The versions of each framework that remat supports: a range each; docs/versions.md says what of it was tried.

Everything that names a range takes it from here: the check when a front end is imported, ``remat doctor``, and the test
that compares it with pyproject.toml.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from typing import Final

from remat.core.errors import UnsupportedVersion, WrongImportOrder

ANY_VERSION_VARIABLE: Final = "REMAT_ANY_VERSION"
"""The environment variable that lets a front end be imported with a version outside of its range, to try one."""


@dataclass(frozen=True)
class Framework:
    """A framework and the range of its versions, both ends included.

    Attributes:
        name: for people: "PyTorch".
        module: what is imported: "torch".
        packages: what it may be installed as; the first is what pip is asked for.
        oldest: major and minor number of the oldest version that was tried.
        newest: those of the newest.
        imported_by: the front end that refuses other versions; "" for a package that no front end imports by itself.
        extra: the extra of remat that brings it; "" for none.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    oldest: tuple[int, int]
    newest: tuple[int, int]
    imported_by: str
    extra: str

    @property
    def range(self) -> str:
        """The range for people: "2.9 to 2.15"."""
        if self.oldest == self.newest:
            return _dotted(self.oldest)
        return f"{_dotted(self.oldest)} to {_dotted(self.newest)}"

    @property
    def requirement(self) -> str:
        """The range for pip: "torch>=2.9,<2.16"."""
        major, minor = self.newest
        return f"{self.packages[0]}>={_dotted(self.oldest)},<{_dotted((major, minor + 1))}"

    def has(self, version: str) -> bool:
        """Is a version within the range? Patch releases and builds ("2.13.0+cpu") count as their minor version."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self.oldest <= (int(found[1]), int(found[2])) <= self.newest

    def installed_version(self) -> str | None:
        """The version that is installed, None for none; nothing is imported."""
        for package in self.packages:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


TENSORFLOW: Final = Framework(
    "TensorFlow",
    "tensorflow",
    ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "intel-tensorflow", "tf-nightly"),
    (2, 19),
    (2, 21),
    "remat.tensorflow",
    "tensorflow",
)
KERAS: Final = Framework("Keras", "keras", ("keras", "keras-nightly"), (3, 12), (3, 15), "remat.keras", "tensorflow")
TF_KERAS: Final = Framework("tf_keras", "tf_keras", ("tf_keras",), (2, 19), (2, 21), "", "")
JAX: Final = Framework("JAX", "jax", ("jax",), (0, 8), (0, 12), "remat.jax", "jax")
TORCH: Final = Framework("PyTorch", "torch", ("torch",), (2, 9), (2, 15), "remat.torch", "torch")

PADDLE: Final = Framework(
    "PaddlePaddle", "paddle", ("paddlepaddle", "paddlepaddle-gpu"), (3, 3), (3, 3), "remat.paddle", "paddle"
)

FRAMEWORKS: Final = (TENSORFLOW, KERAS, TF_KERAS, JAX, TORCH, PADDLE)
"""All of them, in the order in which they are shown."""


def check_version(framework: Framework) -> None:
    """Refuse a version that was not tried, before anything reaches for symbols that it may not have.

    A front end calls this when it is imported. The framework itself is imported and asked, since what is imported need
    not be what is installed.

    Raises:
        ModuleNotFoundError: if it is not installed.
        UnsupportedVersion: if its version is out of range and ``REMAT_ANY_VERSION`` is not set.
    """
    version = str(importlib.import_module(framework.module).__version__)
    if not framework.has(version) and not os.environ.get(ANY_VERSION_VARIABLE):
        raise UnsupportedVersion(refusal(framework, version))


def check_import_order(framework: Framework, first: Framework) -> None:
    """Refuse to import a framework after one that must come second: the process would end without a word.

    Args:
        framework: what is about to be imported.
        first: what must not have been imported before it.

    Raises:
        WrongImportOrder: if it was; the message says which import to move.
    """
    if first.module in sys.modules and framework.module not in sys.modules:
        raise WrongImportOrder(
            f"{first.name} was imported before {framework.name}, and importing {framework.name} now would crash this "
            f"process: put `import {framework.module}` (or `import {framework.imported_by}`) above "
            f"`import {first.module}`, which may follow it"
        )


def refusal(framework: Framework, version: str) -> str:
    """What a front end says to a version out of range."""
    return (
        f"{framework.imported_by} supports {framework.name} {framework.range}, and {version} is installed: "
        f"pip install '{framework.requirement}', or set {ANY_VERSION_VARIABLE}=1 to try this one"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
