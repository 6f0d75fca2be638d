"""The options of every command that takes a SOURCE, written once.

Typer reads a command's signature; ``takes_a_source`` writes these options into it and hands them over as one object.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

import typer

from remat.cli.console import CommandError
from remat.running.cost_model import DEVICE_VARIABLE, device_here, get_profile, profile_names
from remat.running.workload import InputShape, StepOptions

_MODEL: Final = "Where SOURCE is module:callable"
_INPUT_EXAMPLE: Final = "write sizes without the batch, such as 224,224,3 or 128:int32"


def _option(name: str, metavar: str | None = None, **more: Any) -> Any:
    help_text = more.pop("help")
    return typer.Option(name, help=help_text, metavar=metavar, rich_help_panel=_MODEL, **more)


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

    @property
    def model_options_given(self) -> tuple[str, ...]:
        """Which options were given that only make sense with a callable, as they are written."""
        written = {"inputs": "--input", "whole_step": "--step"}
        return tuple(
            written.get(field.name, f"--{field.name.replace('_', '-')}")
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name)
        )

    def step_options(self) -> StepOptions:
        """The same for a front end.

        Raises:
            CommandError: for a shape that cannot be read.
        """
        inputs = tuple(_input_shape(text) for text in self.inputs or ())
        return StepOptions(self.batch_size, inputs, self.loss, self.optimizer, self.whole_step)

    def check_device(self, *, calibrates: bool = False) -> None:
        """Make sure that the device is known, before minutes are spent.

        Args:
            calibrates: does the command itself make the profile of this machine?

        Raises:
            CommandError: if it is not; the message lists the names.
            FileNotFoundError: for ``measured`` where nothing was measured; the message says how to.
            InvalidFile: where what was measured cannot be read.
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


def _input_shape(text: str) -> InputShape:
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    except ValueError:
        raise CommandError(f"--input {text}: {sizes!r} is no list of sizes; {_INPUT_EXAMPLE}") from None
    if any(size < 1 for size in shape):
        raise CommandError(f"--input {text}: every size is 1 or more; {_INPUT_EXAMPLE}")
    return InputShape(shape, dtype.strip() or None)
