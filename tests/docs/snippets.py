"""Code blocks of the documentation, and how the tests run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(python|console)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One code block.

    Attributes:
        page: its page, from the folder of the documentation.
        number: which block of the page it is.
        language: "python" or "console".
        marks: what stands after the language: ``run``, ``slow``, ``framework=jax``, ``title="file.py"``.
        code: the block.
        files: what blocks with a title before it on the page hold, by file name.
    """

    page: str
    number: int
    language: str
    marks: str
    code: str
    files: tuple[tuple[str, str], ...]

    @property
    def framework(self) -> str:
        """The framework that it needs, "" for none."""
        found = re.search(r"framework=(\w+)", self.marks)
        return found[1] if found else ""

    @property
    def is_slow(self) -> bool:
        """Is it for the longer checks?"""
        return "slow" in self.marks.split()

    def run(self, folder: Path) -> str:
        """Run it in a process of its own in an empty folder; the output of Python, or of all its commands."""
        for name, text in self.files:
            (folder / name).write_text(text)
        if self.language == "python":
            (folder / "snippet.py").write_text(self.code)
            return _run([sys.executable, "snippet.py"], folder)
        commands = [line.removeprefix("$ ") for line in self.code.splitlines() if line.startswith("$ ")]
        assert commands, f"{self.page}: a console block without a command"
        return "".join(_run([sys.executable, "-m", "remat.cli", *_arguments(line)], folder) for line in commands)


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page that are run; those with a title are files for the others."""
    found: list[Snippet] = []
    files: list[tuple[str, str]] = []
    for number, (language, marks, code) in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
        if title := re.search(r'title="([^"]+)"', marks):
            files.append((title[1], code))
        else:
            name = page.relative_to(DOCS).as_posix()
            found.append(Snippet(name, number, language, marks.strip(), code, tuple(files)))
    return found


def _arguments(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    assert program == "remat", line
    return arguments


def _run(command: list[str], folder: Path) -> str:
    # What a measurement keeps must not reach the user's own cache.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
