"""The options that several commands share, and what commands check before they spend minutes.

Typer reads the options of a command from its signature. ``takes_a_source`` writes the options of a SOURCE into the
signature, and hands them to the command as one ``Source``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from remat.cli.console import CommandError
from remat.running.cost_model import DEVICE_VARIABLE, device_here, get_profile, profile_names
from remat.running.workload import InputShape, StepOptions

Budget = Annotated[str, typer.Option(help="Peak bytes of a step: 4GiB, 512MB, 1000000, or 60% of the plain peak.")]
PlannerName = Annotated[str, typer.Option("--planner", help="Name of the planner.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]

DEFAULT_BUDGET: Final = "60%"
"""That of ``remat.plan``. The traced models of docs/planners.md keep it for 3 to 9 % more time."""

_MODEL_PANEL: Final = "Where SOURCE is module:callable"  # The heading of these options in ``--help``.
_INPUT_EXAMPLE: Final = "write sizes without the batch, such as 224,224,3 or 128:int32"


def _option(name: str, metavar: str | None = None, **more: Any) -> Any:
    help_text = more.pop("help")
    return typer.Option(name, help=help_text, metavar=metavar, rich_help_panel=_MODEL_PANEL, **more)


@dataclass(frozen=True)
class Source:
    """A SOURCE and everything that the command line says about it; None where it says nothing.

    Attributes:
        name: a graph file, or module:callable.
        kwargs: keyword arguments of the callable, as a JSON object.
        batch_size: samples in a batch.
        inputs: shapes of the inputs, as written.
        device: name of a device profile.
        loss: name of a loss.
        optimizer: name of an optimizer.
        dtype_policy: a Keras dtype policy, such as "mixed_float16".
        whole_step: does the callable return a whole training step?
        mode: how PyTorch carries out a plan.
    """

    name: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A graph file (.json, .json.gz), or module:callable that returns a Keras model, a PyTorch module, or "
            "a loss function and its arguments (JAX, TensorFlow, PyTorch).",
        ),
    ]
    kwargs: Annotated[str | None, _option("--kwargs", "JSON", help="The callable's arguments, as a JSON object.")] = (
        None
    )
    batch_size: Annotated[int | None, _option("--batch-size", min=1, help="Samples in a batch; 32 if not given.")] = (
        None
    )
    inputs: Annotated[
        list[str] | None,
        _option(
            "--input", "SHAPE", help="Shape of an input without the batch: 224,224,3 or 128:int32; may be repeated."
        ),
    ] = None
    device: Annotated[
        str | None,
        _option("--device", "NAME", help=f"Whose speed and memory to predict for: {', '.join(profile_names())}."),
    ] = None
    loss: Annotated[str | None, _option("--loss", "NAME", help="Name of a loss that the framework knows.")] = None
    optimizer: Annotated[
        str | None, _option("--optimizer", "NAME", help="Name of an optimizer that the framework knows.")
    ] = None
    dtype_policy: Annotated[
        str | None, _option("--dtype-policy", "NAME", help="A Keras dtype policy, such as mixed_float16.")
    ] = None
    whole_step: Annotated[
        bool,
        _option("--step", help="The function is a whole training step, gradients and update included, not a loss."),
    ] = False
    mode: Annotated[
        str | None,
        _option("--mode", "NAME", help="How PyTorch carries out a plan: auto (if not given), graph or eager."),
    ] = None

    @property
    def model_options_given(self) -> tuple[str, ...]:
        """The options about a model that were given, as the user writes them. A graph file has no use for them."""
        written_otherwise = {"inputs": "--input", "whole_step": "--step"}
        return tuple(
            written_otherwise.get(field.name, f"--{field.name.replace('_', '-')}")
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name)
        )

    def step_options(self) -> StepOptions:
        """What a front end is told about the step.

        Raises:
            CommandError: for a shape that cannot be read, or an unknown mode.
        """
        if self.mode not in (None, "auto", "graph", "eager"):
            raise CommandError(f"--mode {self.mode} is unknown; it is auto, graph or eager")
        inputs = tuple(_input_shape(text) for text in self.inputs or ())
        return StepOptions(self.batch_size, inputs, self.loss, self.optimizer, self.whole_step, self.mode)

    def check_device(self, *, calibrates: bool = False) -> None:
        """Make sure that there is a profile of the device.

        Args:
            calibrates: does the command itself measure this machine, so that ``measured`` need not be there yet?

        Raises:
            CommandError: if it is not; the message lists the names.
            FileNotFoundError: for ``measured`` on a machine that was not measured; the message says how to.
            InvalidFile: if the file of the measurement cannot be read.
        """
        name = self.device or device_here("cpu")
        if name.lower() not in profile_names():
            given = f"--device {name}" if self.device else f"{DEVICE_VARIABLE}={name}"
            raise CommandError(
                f"{given}: there is no device profile of this name; choose one of {', '.join(profile_names())}"
            )
        if not calibrates:
            get_profile(name)


def takes_a_source(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command whose first parameter is a ``Source`` the SOURCE argument and the options about it."""
    hints = get_type_hints(Source, include_extras=True)
    fields = dataclasses.fields(Source)
    about_source = [
        inspect.Parameter(
            "source" if field.name == "name" else field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields
    ]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[parameter.name])
        for parameter in list(inspect.signature(command).parameters.values())[1:]
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {f.name: given.pop("source" if f.name == "name" else f.name) for f in fields}
        command(Source(**values), **given)

    parameters = [about_source[0], *own, *about_source[1:]]
    vars(wrapped)["__signature__"] = inspect.Signature(parameters)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def check_planner(name: str) -> None:
    """Make sure that a planner exists.

    Raises:
        CommandError: if not; the message lists the names.
    """
    from remat.planners import get_planner

    try:
        get_planner(name)
    except ValueError as error:
        raise CommandError(f"--planner {name}: {error}") from error


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """Make sure that matplotlib can write a picture of this name.

    Raises:
        CommandError: if not; the message lists the formats.
    """
    if path is None:
        return
    from remat.report import plots

    try:
        plots.check_picture_path(path)
    except ValueError as error:
        raise CommandError(f"{option} {error}") from error


def check_output_path(path: Path | None, option: str, *, keep: Sequence[str | Path | None] = ()) -> None:
    """Make sure that a file can be written.

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
    """Make sure that optional packages are installed.

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


def _input_shape(text: str) -> InputShape:
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    except ValueError:
        raise CommandError(f"--input {text}: {sizes!r} is no list of sizes; {_INPUT_EXAMPLE}") from None
    if any(size < 1 for size in shape):
        raise CommandError(f"--input {text}: every size is 1 or more; {_INPUT_EXAMPLE}")
    return InputShape(shape, dtype.strip() or None)
