"""Turns the SOURCE of a command into a graph: a graph file, or a callable that builds a Keras model."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from remat.cli.console import CommandError, describe_error, progress, traceback_wanted
from remat.cli.native_log import native_log_held_back
from remat.errors import RematError
from remat.graph import Graph
from remat.serialization import load_graph

_CALLABLE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DEFAULT_BATCH_SIZE: Final = 32


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says about a model; None where it says nothing.

    Attributes:
        kwargs: keyword arguments of the callable, as a JSON object.
        batch_size: samples in a batch.
        device: the name of a device profile, or ``"measured"``.
        loss: a name that Keras knows.
        optimizer: a name that Keras knows.
        dtype_policy: a name that Keras knows, such as ``"mixed_float16"``.
    """

    kwargs: str | None = None
    batch_size: int | None = None
    device: str | None = None
    loss: str | None = None
    optimizer: str | None = None
    dtype_policy: str | None = None


def graph_from_source(source: str, options: ModelOptions) -> Graph:
    """Read the graph file ``source``, or trace the model that ``module:callable`` builds.

    Raises:
        CommandError: if there is no such file or callable, or if building or tracing the model fails.
        RematError: if the file is no valid graph.
    """
    if Path(source).exists() or not _CALLABLE.fullmatch(source):
        _refuse_model_options(source, options)
        if not Path(source).exists():
            raise CommandError(
                f"{source}: there is no such file. Name a graph file (.json or .json.gz), or a model as "
                "module:callable, such as keras.applications:ResNet50"
            )
        with progress(f"Reading {source}"):
            return load_graph(source)
    arguments = _parse_kwargs(options.kwargs)
    quiet = contextlib.nullcontext() if traceback_wanted() else native_log_held_back()
    # Whatever frameworks and models print must not end up between the results on stdout.
    with quiet, contextlib.redirect_stdout(sys.stderr):
        with progress(f"Building {source}"):
            model = _build(source, arguments, options.dtype_policy)
        with progress(f"Tracing a training step of {source}"):
            return _trace(source, model, options)


def _refuse_model_options(source: str, options: ModelOptions) -> None:
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(
            f"{source} is a graph file, whose sizes and times are fixed: {names} can be given with a model "
            "(module:callable) only"
        )


def _parse_kwargs(text: str | None) -> Mapping[str, Any]:
    example = """write a JSON object, such as '{"weights": null}'"""
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"--kwargs {text}: this is no valid JSON ({error}); {example}") from error
    if not isinstance(arguments, dict):
        raise CommandError(f"--kwargs {text}: this is a JSON {type(arguments).__name__}, no object; {example}")
    return arguments


def _build(source: str, arguments: Mapping[str, Any], dtype_policy: str | None) -> Any:
    build = _import_callable(source)
    if dtype_policy is not None:
        import keras

        try:
            keras.config.set_dtype_policy(dtype_policy)
        except (TypeError, ValueError) as error:
            raise CommandError(f"--dtype-policy {dtype_policy}: {describe_error(error)}") from error
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    try:
        return build(**arguments)
    except Exception as error:
        raise CommandError(
            f"{source}: calling it as {source.partition(':')[2]}({shown}) raised {type(error).__name__}: "
            f"{describe_error(error)}"
        ) from error


def _import_callable(source: str) -> Callable[..., Any]:
    module_name, _, path = source.partition(":")
    # As `python -m` does: a model of one's own lies in the current folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("keras", "tensorflow"):
            raise
        raise CommandError(
            f"{source}: importing {module_name!r} raised {type(error).__name__}: {describe_error(error)}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise CommandError(f"{source}: {_name_of(found)} has no attribute {name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise CommandError(
            f"{source}: this is not callable (its type is {type(found).__name__}); name what builds the model"
        )
    build: Callable[..., Any] = found
    return build


def _name_of(found: Any) -> str:
    return f"{getattr(found, '__name__', type(found).__name__)!r}"


def _trace(source: str, model: Any, options: ModelOptions) -> Graph:
    import keras

    if not isinstance(model, keras.Model):
        raise CommandError(f"{source}: this returned no Keras model (its type is {type(model).__name__})")

    from remat.keras import trace_model

    wanted = {"device": options.device, "loss": options.loss, "optimizer": options.optimizer}
    batch_size = _DEFAULT_BATCH_SIZE if options.batch_size is None else options.batch_size
    try:
        graph: Graph = trace_model(
            model, batch_size=batch_size, **{name: value for name, value in wanted.items() if value is not None}
        )
    except RematError:
        raise
    except Exception as error:
        raise CommandError(
            f"{source}: tracing its training step raised {type(error).__name__}: {describe_error(error)}"
        ) from error
    return graph
