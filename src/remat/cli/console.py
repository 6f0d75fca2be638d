"""The terminal, as every command uses it: errors of one line, progress on stderr, results or JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer import Abort
from typer.core import TyperGroup
from typer.exceptions import TyperException

from remat.core.errors import RematError

_USER_ERROR: Final = 2  # The exit code of Click, and of Unix commands in general, for a wrong command line.
_TRACEBACK_VARIABLE: Final = "REMAT_TRACEBACK"
_LONGEST_LINE: Final = 600  # Characters of an error: some eight lines of a terminal. Longer ones are cut.
_STDERR: Final = 2  # The file descriptor, which native libraries write to.
# The extra of pyproject.toml that brings each optional package.
_EXTRAS: Final = {
    "jax": "jax",
    "keras": "tensorflow",
    "matplotlib": "plots",
    "sklearn": "demo",
    "tensorflow": "tensorflow",
    "torch": "torch",
}


class CommandError(RematError):
    """The command line asks for something that cannot be done; the message says what to write instead."""


class OneLineErrors(TyperGroup):
    """Ends every failure that a user can cause with one line on stderr and exit code 2.

    A traceback is left to defects of remat itself, or to whoever sets ``REMAT_TRACEBACK=1``.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command, then leave the process with its exit code."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(
                given or ["--help"],
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            # A reader that has left or a full disk shows here at the latest, not while the interpreter shuts down.
            # A process that was started with stdout closed has none.
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _discard_unwritten()
            code = 1
        except Abort:
            code = 130
        except (RematError, TyperException, OSError, ModuleNotFoundError) as error:
            if isinstance(error, ModuleNotFoundError) and _extra_for(error) is None:
                raise
            if traceback_wanted():
                traceback.print_exc()
            print(f"remat: {describe_error(error)}", file=sys.stderr)
            _discard_unwritten()
            code = _USER_ERROR
        sys.exit(code if isinstance(code, int) else 0)


def traceback_wanted() -> bool:
    """Did the user ask for everything: tracebacks, and the logs of native libraries?"""
    return bool(os.environ.get(_TRACEBACK_VARIABLE))


def describe_error(error: BaseException) -> str:
    """An error as one line of limited length, without the name of its class where the message stands alone."""
    if isinstance(error, TyperException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    elif isinstance(error, ModuleNotFoundError) and (extra := _extra_for(error)):
        text = f"this needs the package {error.name!r}, which is not installed: pip install 'remat[{extra}]'"
    else:
        text = str(error) or type(error).__name__
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


@contextmanager
def progress(task: str) -> Iterator[None]:
    """Show a spinner with the elapsed time on stderr while the body runs; silent where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(task, total=None)
        yield


@contextmanager
def counted_progress(task: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; silent where stderr is no terminal. The body moves it by calling ``moved(done, total)``."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        number = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)


def print_line(text: str) -> None:
    """Write a line of any length to stdout, without colours and without reading rich's marks in it."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(values: Mapping[str, Any]) -> None:
    """Write one JSON object, and nothing else, to stdout."""
    print(json.dumps(values, allow_nan=False))


@contextmanager
def native_log_held_back() -> Iterator[None]:
    """Drop what native code writes to file descriptor 2; Python's own ``sys.stderr`` works as before.

    TensorFlow 2.21 writes a dozen lines there while it is imported, before any setting of its log level counts, and
    again when it looks for GPUs. They would bury a command's one line. A native crash loses its last words in here, so
    the caller should offer a way to do without.
    """
    try:
        terminal = os.dup(_STDERR)
    except OSError:
        # Started with stderr closed: there is nothing to keep clean.
        yield
        return
    python_stderr = sys.stderr
    python_stderr.flush()
    # A stream that is not on the descriptor, such as a test's, needs no way around.
    if _writes_to_descriptor(python_stderr):
        # Never closed: log handlers that a library sets up meanwhile keep this stream for good.
        sys.stderr = open(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(terminal, _STDERR)
        sys.stderr = python_stderr


def _extra_for(error: ModuleNotFoundError) -> str | None:
    return _EXTRAS.get((error.name or "").partition(".")[0])


def _discard_unwritten() -> None:
    """Point a stdout that cannot be written at nothing, so that the interpreter's last flush does not fail again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _writes_to_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STDERR
    except (OSError, ValueError):
        return False
