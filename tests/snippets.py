"""Code blocks of the documentation, and how the tests run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from worker_process import worker

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WORKER = ROOT / "tests" / "docs" / "snippet_worker.py"
_BLOCK = re.compile(r"^```(python|console)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One code block.

    Attributes:
        page: its page, from the root of the repository.
        number: which block of the page it is.
        language: "python" or "console".
        marks: what stands after the language: ``framework=jax``, ``slow``, ``not-run``, ``title="file.py"``.
        code: the block.
        files: what blocks with a title before it on the page hold, by file name.
    """

    page: str
    number: int
    language: str
    marks: str
    code: str
    files: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"

    @property
    def framework(self) -> str:
        """The framework that it needs, "" for none."""
        found = re.search(r"framework=(\w+)", self.marks)
        return found[1] if found else ""

    @property
    def is_slow(self) -> bool:
        """Is it for the longer checks?"""
        return "slow" in self.marks.split()

    def run(self, folder: Path, *, after: str = "") -> str:
        """Run it in an empty folder; what Python, or all its commands, print.

        Args:
            folder: where it runs.
            after: Python that runs behind it, such as checks of its variables.
        """
        for name, text in self.files:
            (folder / name).write_text(text)
        if self.language == "python":
            script = folder / "snippet.py"  # tf.function needs a file to read the source from.
            script.write_text(self.code + after)
            return run_script(self.framework, script)
        commands = [line.removeprefix("$ ") for line in self.code.splitlines() if line.startswith("$ ")]
        assert commands, f"{self}: a console block without a command"
        return "".join(_run_command(line, folder) for line in commands)


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page that can be run; those with a title are files for the others."""
    found: list[Snippet] = []
    files: list[tuple[str, str]] = []
    for number, (language, marks, code) in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
        if title := re.search(r'title="([^"]+)"', marks):
            files.append((title[1], code))
        elif "not-run" not in marks.split():
            name = page.relative_to(ROOT).as_posix()
            found.append(Snippet(name, number, language, marks.strip(), code, tuple(files)))
    return found


def run_script(framework: str, script: Path, *arguments: str) -> str:
    """What a script prints, run in the one process that all scripts of a framework share."""
    # Keras' snippets need the backend of TensorFlow's, so that one process answers for both.
    environment = {"keras": "tensorflow"}.get(framework, framework)
    process = worker(WORKER, FRAMEWORK_OF_SNIPPETS=environment, KERAS_BACKEND="tensorflow")
    printed = process.ask("run", str(script), *arguments)
    assert isinstance(printed, str)
    return printed


def _run_command(line: str, folder: Path) -> str:
    program, *arguments = shlex.split(line)
    assert program == "remat", line
    # What a measurement keeps must not reach the user's own cache.
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "remat.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{line}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
