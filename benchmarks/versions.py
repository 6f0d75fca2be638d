"""Which versions of the frameworks pass the quick tests of their front end: ``make versions``.

Makes an environment for each combination in a folder for temporary files, runs that front end's quick tests there, and
writes the table of docs/versions.md. What a combination came to is kept in the folder, so a run that was stopped goes
on where it stopped; ``--again NAME`` forgets one. PyTorch's wheels on PyPI bring CUDA's libraries, some 5 GB each; they
run on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "versions.md"
# What the tests of every front end import beside the framework: what remat needs, in its range, and their own.
COMMON: Final = (
    *tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"],
    "hypothesis",
    "matplotlib",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
)
INSTALL_LIMIT_S: Final = 1800  # Judgements, on two cores: CUDA's libraries arrive in ten minutes, and the longest
TEST_LIMIT_S: Final = 1800  # quick tests, TensorFlow's, take six.
# A test that stands still for so long prints where, for the log. The slowest quick test takes a tenth of it.
STANDSTILL_S: Final = 300


@dataclass(frozen=True)
class Combination:
    """Versions that belong together.

    Attributes:
        front_end: whose tests are run: a key of ``TESTS``.
        versions: the exact versions, package by package.
        beside: further packages that the tests import, in versions that fit these.
        without_dependencies: packages whose dependencies are not installed, since they ask for another build.
        least_python: the oldest Python that the versions run on.
    """

    front_end: str
    versions: tuple[str, ...]
    beside: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()
    least_python: tuple[int, int] = (3, 11)

    @property
    def name(self) -> str:
        """For files and for the command line: "torch-2.9.0"."""
        return self.versions[0].replace("==", "-")

    @property
    def environment(self) -> str:
        """The folder of its environment, which combinations of the same packages share."""
        packages = sorted({*self.versions, *self.beside, *self.without_dependencies})
        return "with-" + "-".join(package.replace("==", "-") for package in packages)


TESTS: Final = {
    "PyTorch": ("tests/torch",),
    "JAX": ("tests/jax",),
    "TensorFlow": ("tests/tensorflow",),
    "Keras": ("tests/keras", "tests/keras_jax", "tests/keras_torch"),
    "PaddlePaddle": ("tests/paddle",),
}

# Of each minor version the newest patch at the time of writing; of the oldest the first, whose users cannot upgrade.
_TENSORFLOW: Final = (
    (("tensorflow-cpu==2.19.0", "keras==3.12.0"), "tf_keras==2.19.0"),
    (("tensorflow-cpu==2.20.0", "keras==3.13.2"), "tf_keras==2.20.1"),
    (("tensorflow-cpu==2.21.0", "keras==3.15.0"), "tf_keras==2.21.0"),
    (("tensorflow-cpu==2.21.0", "keras==3.15.1"), "tf_keras==2.21.0"),
)
_OTHER_BACKENDS: Final = ("jax", "torch==2.13.0")
COMBINATIONS: Final = (
    *(Combination("PyTorch", (f"torch=={v}",), ("transformers",)) for v in ("2.9.0", "2.13.0", "2.14.1", "2.15.0")),
    *(
        Combination("JAX", (f"jax=={v}", f"jaxlib=={v}"), ("equinox", "flax", "optax"))
        for v in ("0.8.0", "0.8.3", "0.9.0", "0.9.2", "0.10.0", "0.10.2")
    ),
    *(
        Combination("JAX", (f"jax=={v}", f"jaxlib=={v}"), ("equinox", "flax", "optax"), least_python=(3, 12))
        for v in ("0.11.2", "0.12.0.1")
    ),
    # Keras imports JAX and PyTorch if it finds them, and would find the folders of their tests where there are none.
    *(Combination("TensorFlow", versions, _OTHER_BACKENDS, (other,)) for versions, other in _TENSORFLOW[:3]),
    *(Combination("Keras", tuple(reversed(versions)), _OTHER_BACKENDS, (other,)) for versions, other in _TENSORFLOW),
    *(Combination("PaddlePaddle", (f"paddlepaddle=={v}",)) for v in ("3.3.0", "3.3.1")),
)


@dataclass(frozen=True)
class Outcome:
    """What a combination came to.

    Attributes:
        passed: tests that passed; those below are what pytest counts, too.
        failed: tests that failed, errors included.
        skipped: tests that did not run.
        note: why there are no such numbers, "" where there are; or the first tests that failed.
        date: of the run, as in "2026-11-22".
    """

    passed: int
    failed: int
    skipped: int
    note: str
    date: str


def tested(combination: Combination, folder: Path) -> Outcome:
    """Make the environment of a combination, unless it is there, and run the tests in it.

    What the tests print is kept in the folder, beside the environment.
    """
    environment = folder / combination.environment
    python = environment / "bin" / "python"
    today = datetime.date.today().isoformat()
    if sys.version_info < combination.least_python:
        return Outcome(0, 0, 0, f"needs Python {'.'.join(map(str, combination.least_python))}", today)
    if not (environment / "installed").exists():
        venv.create(environment, clear=True, with_pip=True)
        wanted = [*combination.versions, *combination.beside, *COMMON]
        for packages in (wanted, ["--no-deps", *combination.without_dependencies]):
            if packages == ["--no-deps"]:
                continue
            failure = run_quietly([str(python), "-m", "pip", "install", "--quiet", *packages], INSTALL_LIMIT_S)[1]
            if failure:
                return Outcome(0, 0, 0, f"could not be installed: {failure}", today)
        (environment / "installed").touch()
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not thorough",
        "-p",
        "no:cacheprovider",
        "-o",
        f"faulthandler_timeout={STANDSTILL_S}",
        *TESTS[combination.front_end],
    ]
    output, failure = run_quietly(command, TEST_LIMIT_S, folder / f"{combination.name}.{combination.front_end}.log")
    counts = counted(output)
    if not counts:
        return Outcome(0, 0, 0, f"the tests did not come to their end: {failure}", today)
    failed = counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
    return Outcome(counts.get("passed", 0), failed, counts.get("skipped", 0), first_failures(output), today)


def run_quietly(command: Sequence[str], limit_s: float, log: Path | None = None) -> tuple[str, str]:
    """What a command prints, and the last line of what it says where it fails.

    Args:
        command: the program and its arguments.
        limit_s: when it is ended.
        log: where everything that it prints is kept, also if it is ended.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "REMAT_ANY_VERSION": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    failure = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            failure = f"it took more than {limit_s:g} s"
        output.seek(0)
        printed = output.read()
    if log is not None:
        log.write_text(printed, encoding="utf-8")
    if not failure and code:
        failure = (printed.strip().splitlines() or ["it said nothing"])[-1]
    return printed, failure


def counted(output: str) -> dict[str, int]:
    """The numbers in pytest's last line, behind which libraries may print; empty where it did not come to its end."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in \d+\.\d+s", line)]
    if not lines:
        return {}
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])}


def first_failures(output: str) -> str:
    """The names of the first tests that failed."""
    names = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::[^\s\[]+)?)", output, re.MULTILINE)
    names = list(dict.fromkeys(names))
    return ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def table(outcomes: Iterable[tuple[Combination, Outcome]]) -> str:
    """The table of docs/versions.md."""
    lines = [
        "| front end | versions | quick tests passed | failed | skipped | date | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for combination, outcome in outcomes:
        versions = ", ".join(one.replace("==", " ") for one in combination.versions if not one.startswith("jaxlib"))
        lines.append(
            f"| {combination.front_end} | {versions} | {outcome.passed} | {outcome.failed} | {outcome.skipped} | "
            f"{outcome.date} | {outcome.note} |"
        )
    return "\n".join(lines)


def with_table(page: str, new_table: str, machine: str) -> str:
    """The page with the table between its marks replaced."""
    begin, end = "<!-- table -->", "<!-- end of table -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{machine}\n\n{new_table}\n\n{end}{rest.partition(end)[2]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left to run, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("names", nargs="*", help="combinations, such as torch-2.9.0; all if none is named")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "remat-versions")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="forget what this one came to")
    options = parser.parse_args(arguments)
    known = {one.name for one in COMBINATIONS}
    if unknown := {*options.names, *options.again} - known:
        parser.error(f"there is no combination {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    finished: list[tuple[Combination, Outcome]] = []
    for combination in COMBINATIONS:
        kept = options.folder / f"{combination.name}.{combination.front_end}.json"
        if combination.name in options.again:
            kept.unlink(missing_ok=True)
        if not kept.exists():
            if options.names and combination.name not in options.names:
                continue
            print(f"{combination.front_end}: {', '.join(combination.versions)}", file=sys.stderr, flush=True)
            started = time.monotonic()
            outcome = tested(combination, options.folder)
            print(f"  {outcome.passed} passed, {outcome.failed} failed {outcome.note}", file=sys.stderr, flush=True)
            kept.write_text(json.dumps({**vars(outcome), "seconds": round(time.monotonic() - started)}))
        stored: dict[str, Any] = json.loads(kept.read_text())
        finished.append((combination, Outcome(**{name: stored[name] for name in Outcome.__dataclass_fields__})))
    machine = (
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}."
    )
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(finished), machine), encoding="utf-8")


if __name__ == "__main__":
    main()
