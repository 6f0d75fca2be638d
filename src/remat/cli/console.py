"""What every command shares: errors of one line, progress on stderr, JSON on stdout."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

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

USER_ERROR: Final = 2
_TRACEBACK_VARIABLE: Final = "REMAT_TRACEBACK"
_LONGEST_LINE: Final = 600
# Which extra brings an optional package.
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
            code = USER_ERROR
        sys.exit(code if isinstance(code, int) else 0)


def traceback_wanted() -> bool:
    """Whether the user asked for all there is: tracebacks, and what native libraries write to stderr."""
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


def check_output_path(path: Path | None, option: str, *, keep: Sequence[str | Path | None] = ()) -> None:
    """Make sure that a file can be written, before minutes are spent on what goes into it.

    Raises:
        CommandError: if its folder is missing, if it is a folder, or if it is one of the files to keep.
    """
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option} {path}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CommandError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{option} {path}: the folder {path.parent} cannot be written to; name another one")
    for other in keep:
        if other is not None and path.exists() and Path(other).exists() and path.samefile(other):
            raise CommandError(
                f"{option} {path}: this would overwrite a file that the command reads; choose another name"
            )


def check_installed(*packages: str) -> None:
    """Make sure that optional packages are there, before minutes are spent without them.

    Raises:
        ModuleNotFoundError: for the first that is missing.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def check_time_limit(time_limit_s: float | None) -> None:
    """Make sure that a time limit is a number of seconds above 0.

    Raises:
        CommandError: otherwise.
    """
    if time_limit_s is not None and not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise CommandError(f"--time-limit {time_limit_s:g}: write a number of seconds above 0, such as 10")


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
    """Show a bar on stderr that is moved by calling what is yielded with (done, total); silent without a terminal."""
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


def print_json(values: Mapping[str, Any]) -> None:
    """Write one JSON object, and nothing else, to stdout."""
    print(json.dumps(values, allow_nan=False))


def _extra_for(error: ModuleNotFoundError) -> str | None:
    return _EXTRAS.get((error.name or "").partition(".")[0])


def _discard_unwritten() -> None:
    """Point a stdout that cannot be written at nothing, so that the interpreter's last flush does not fail again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
