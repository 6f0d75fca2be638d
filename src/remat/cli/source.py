"""From the SOURCE of a command to a graph or a training step.

A SOURCE is a graph file, or ``module:callable``. What the callable returns belongs to a framework. Each front end turns
its framework's objects into a step by one function, ``remat.<framework>.workload.make_workload(made, options)``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from remat.cli.console import CommandError, describe_error, native_log_held_back, progress, traceback_wanted
from remat.cli.options import Source
from remat.core.errors import RematError
from remat.core.graph import Graph, load_graph
from remat.running.cost_model import device_here, get_profile
from remat.running.workload import NotAStep, StepOptions, Training, Workload

_CALLABLE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FRAMEWORKS: Final = ("jax", "keras", "paddle", "tensorflow", "torch")
# The front end for the package that an object's class, or a module that a function uses, comes from.
_FRONT_ENDS: Final = {"jax": "jax", "jaxlib": "jax", "paddle": "paddle", "tensorflow": "tensorflow", "torch": "torch"}
# PyTorch's front end chooses by the GPU, and says so itself.
_ASSUMED_OF_GPUS: Final = {
    "jax": "the operations are those of the JAX program (attention as its implementation= says; none means products "
    "written out); what XLA fuses on a GPU, and the workspaces of cuDNN and cuBLAS there, are not known",
    "tensorflow": "the operations are the same on a GPU; the workspaces of cuDNN and cuBLAS there are not known, and "
    "not counted",
    "paddle": "the operators are the same on a GPU; the workspaces of cuDNN and cuBLAS there are not known, and not "
    "counted",
}
"""What a plan for a GPU takes for granted, by framework, where the trace itself says nothing."""

_WHAT_TO_RETURN: Final = (
    "return a Keras model, a PyTorch module, a layer of Paddle, or a tuple of a loss function and its arguments, such "
    "as (loss, params, batch)"
)


def graph_from_source(source: Source) -> Graph:
    """Read the graph file, or trace the training step that ``module:callable`` returns.

    Raises:
        CommandError: if there is no such file or callable, or if calling it or tracing its step fails.
        RematError: if the file is no valid graph.
    """
    if is_file(source):
        with progress(f"Reading {source.name}"):
            return load_graph(source.name)
    workload = workload_from_source(source)
    return traced(source, workload)


def is_file(source: Source) -> bool:
    """Whether the source is a graph file, and not ``module:callable``.

    Raises:
        CommandError: if it is neither, or if options were given that a file has no use for.
    """
    if not Path(source.name).exists() and _CALLABLE.fullmatch(source.name):
        return False
    if given := source.model_options_given:
        raise CommandError(
            f"{source.name} is a graph file, whose sizes and times are fixed: {', '.join(given)} can be given with a "
            "model (module:callable) only"
        )
    if not Path(source.name).exists():
        raise CommandError(
            f"{source.name}: there is no such file. Name a graph file (.json or .json.gz), or a model as "
            "module:callable, such as keras.applications:ResNet50"
        )
    return True


def workload_from_source(source: Source) -> Workload:
    """Import and call ``module:callable``; the training step in what it returns.

    Raises:
        CommandError: where that fails; the message says how.
    """
    arguments = _parse_kwargs(source.kwargs)
    options = source.step_options()
    with quiet_frameworks():
        with progress(f"Building {source.name}"):
            made, took_batch_size = _build(source, arguments, options)
        if options.batch_size is not None and not took_batch_size and isinstance(made, tuple):
            raise CommandError(
                f"{source.name}: --batch-size {options.batch_size} has nowhere to go: the callable returns a function "
                "with its arguments; let it take batch_size as an argument"
            )
        with progress(f"Preparing {source.name}"), _errors_name(source, "preparing its training step"):
            return make_workload(made, options)


def builder_from_source(source: Source) -> Callable[[int], tuple[Any, ...]]:
    """For a number of samples, what ``module:callable`` returns: a loss function of PyTorch with its arguments.

    Raises:
        CommandError: when it is called: if that fails, or the callable does not take ``batch_size``.
    """
    arguments = _parse_kwargs(source.kwargs)

    def build(samples: int) -> tuple[Any, ...]:
        options = dataclasses.replace(source.step_options(), batch_size=samples)
        with quiet_frameworks():
            made, took_batch_size = _build(source, arguments, options)
        if not isinstance(made, tuple) or framework_of(made) != "torch":
            raise CommandError(
                f"{source.name}: --mesh takes a loss function of PyTorch with its arguments, not {_described(made)}"
            )
        if not took_batch_size:
            raise CommandError(
                f"{source.name}: --mesh cuts the batch over the devices, so that the callable is told how many samples "
                "each has; let it take batch_size as an argument"
            )
        return made

    return build


def traced(source: Source, workload: Workload) -> Graph:
    """The graph of a workload, for the device that the command line names.

    Raises:
        CommandError: if tracing fails.
    """
    samples = "" if workload.batch_size is None else f" at batch size {workload.batch_size}"
    doing = f"Tracing a training step of {source.name}{samples}"
    device = source.device or device_here("cpu")
    with quiet_frameworks(), progress(doing), _errors_name(source, "tracing its training step"):
        graph = workload.graph(device)
    is_for_gpu = get_profile(device).compute_capability is not None
    if is_for_gpu and not graph.notes and (note := _ASSUMED_OF_GPUS.get(computing_framework(workload))):
        return dataclasses.replace(graph, notes=(note,))
    return graph


def computing_framework(workload: Workload) -> str:
    """The framework that runs the operations: for a Keras model that of its backend."""
    if workload.framework != "keras":
        return workload.framework
    import keras

    return str(keras.backend.backend())


def make_workload(made: object, options: StepOptions) -> Workload:
    """The training step in what a callable returned.

    Raises:
        NotAStep: if there is none in it, if it is not clear whose it is, or for a mode elsewhere than on PyTorch.
        RematError: where the front end cannot use it.
    """
    framework = framework_of(made)
    module: Any = importlib.import_module(f"remat.{framework}.workload")
    hint = _hint_about_a_tuple(made)
    with _errors_hint(hint):
        workload: Workload = module.make_workload(made, options)
    if options.mode is not None and computing_framework(workload) != "torch":
        raise NotAStep(f"--mode is for PyTorch, and this is a step of {computing_framework(workload)}; leave it out")
    if hint:
        hinting: Any = _Hinting(workload, hint)
        return cast("Workload", hinting)
    return workload


def _hint_about_a_tuple(made: object) -> str:
    """What to write where all arguments came in one tuple, which may be meant; "" where they did not."""
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple) or not made[1]:
        return ""
    name = getattr(made[0], "__name__", type(made[0]).__name__).replace("<lambda>", "loss")
    arguments = ", ".join("abcdefgh"[: len(made[1])]) if len(made[1]) > 1 else "batch"
    in_tuple = arguments if len(made[1]) > 1 else f"{arguments},"
    return f"return ({name}, {arguments}) in place of ({name}, ({in_tuple})), unless {name} takes one tuple"


@contextlib.contextmanager
def _errors_hint(hint: str) -> Iterator[None]:
    """Let errors of what a user's function does end with a hint."""
    try:
        yield
    except Exception as error:
        if not hint or _is_framework_missing(error):
            raise
        raise NotAStep(f"the training step raised {type(error).__name__}: {describe_error(error)}; {hint}") from error


class _Hinting:
    """A workload whose arguments came in one tuple. If it is no step, the error says what to write."""

    def __init__(self, workload: Workload, hint: str) -> None:
        self._workload = workload
        self._hint = hint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def graph(self, device: str) -> Graph:
        """See ``Workload``."""
        with _errors_hint(self._hint):
            return self._workload.graph(device)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """See ``Workload``. ``remat measure`` trains a plain step first, which it does not trace."""
        with _errors_hint(self._hint) if budget is None else contextlib.nullcontext():
            return self._workload.train(budget, steps, nudged=nudged)


def framework_of(made: object) -> str:
    """The front end for what a callable returned: "keras", "tensorflow", "jax", "torch" or "paddle".

    No framework is imported to find out: an object can only exist where its framework was imported already.

    Raises:
        NotAStep: if it belongs to none, or to several.
    """
    if _is_a("keras", "Model", made):
        return "keras"
    if _is_a("torch.nn", "Module", made):
        return "torch"
    if _is_a("paddle.nn", "Layer", made):
        return "paddle"
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise NotAStep(f"this returned {_described(made)}, no training step; {_WHAT_TO_RETURN}")
    function, *arguments = made
    if _is_a("torch.nn", "Module", function):
        return "torch"
    if _is_a("paddle.nn", "Layer", function):
        return "paddle"
    found = set(_frameworks_of_leaves(arguments)) or set(_frameworks_of_code(function))
    if len(found) != 1:
        which = " and ".join(sorted(found)) or "none of jax, paddle, tensorflow and torch"
        raise NotAStep(
            f"the loss function {getattr(function, '__name__', function)!r} and its arguments belong to {which}; give "
            "the arguments as arrays of one framework"
        )
    return found.pop()


@contextlib.contextmanager
def quiet_frameworks() -> Iterator[None]:
    """Keep what frameworks and models print from between the results on stdout."""
    held_back = contextlib.nullcontext() if traceback_wanted() else native_log_held_back()
    with held_back, contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _errors_name(source: Source, doing: str) -> Iterator[None]:
    """Let errors name the source, and say what was being done where their message does not stand alone."""
    try:
        yield
    except RematError as error:
        if source.name in str(error):
            raise
        raise CommandError(f"{source.name}: {error}") from error
    except Exception as error:
        if _is_framework_missing(error):
            raise
        raise CommandError(f"{source.name}: {doing} raised {type(error).__name__}: {describe_error(error)}") from error


def _is_framework_missing(error: BaseException) -> bool:
    """Is a framework not installed? The command line then says by itself which package brings it."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _FRAMEWORKS


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


def _build(source: Source, arguments: Mapping[str, Any], options: StepOptions) -> tuple[Any, bool]:
    """What the callable returns, and whether it was told the batch size."""
    build = _import_callable(source.name)
    if source.dtype_policy is not None:
        import keras

        try:
            keras.config.set_dtype_policy(source.dtype_policy)
        except (TypeError, ValueError) as error:
            raise CommandError(f"--dtype-policy {source.dtype_policy}: {describe_error(error)}") from error
    parameters = _parameters(build)
    given = dict(arguments)
    if "batch_size" in parameters and "batch_size" not in given and options.batch_size is not None:
        given["batch_size"] = options.batch_size
    if isinstance(parameters.get("weights"), str) and "weights" not in given:
        # The models of keras.applications would download trained weights. They change no byte and no second of a step.
        given["weights"] = None
    needed = [name for name, default in parameters.items() if default is inspect.Parameter.empty and name not in given]
    # Where an argument has a wrong name, the call's own error says so.
    if needed and given.keys() <= parameters.keys():
        example = json.dumps(dict.fromkeys(needed, "..."))
        raise CommandError(
            f"{source.name}: calling it needs {', '.join(needed)}; give {'it' if len(needed) == 1 else 'them'} as "
            f"--kwargs '{example}', or name a callable without arguments that returns the model, or the loss function "
            "and its arguments"
        )
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
    try:
        return build(**given), "batch_size" in given
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{source.name}: calling it as {source.name.partition(':')[2]}({shown}) raised {type(error).__name__}: "
            f"{describe_error(error)}"
        ) from error


def _parameters(build: Callable[..., Any]) -> dict[str, Any]:
    """For each parameter that can be given by name, its default, ``Parameter.empty`` where it has none."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: p.default for p in named}


def _import_callable(name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    # `python -m` looks in the current folder, too: that is where users keep their models.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A script that is run when it is imported may end itself.
        if _is_framework_missing(error):
            raise
        raise CommandError(
            f"{name}: importing {module_name!r} raised {type(error).__name__}: {describe_error(error)}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{name}: {_name_of(found)} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(
            f"{name}: this is not callable (its type is {type(found).__name__}); name what builds the model"
        )
    build: Callable[..., Any] = found
    return build


def _name_of(found: Any) -> str:
    return f"{getattr(found, '__name__', type(found).__name__)!r}"


def _is_a(module: str, name: str, made: object) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(made, kind)


def _frameworks_of_leaves(value: object, depth: int = 0) -> Iterator[str]:
    for base in type(value).__mro__:
        if framework := _FRONT_ENDS.get(base.__module__.partition(".")[0]):
            yield framework
            return
    if depth > 20:
        return
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()  # Dataclasses, modules of Equinox.
    for item in inner:
        yield from _frameworks_of_leaves(item, depth + 1)


def _frameworks_of_code(function: Any) -> Iterator[str]:
    """What the code of a function uses, for arguments that are all numbers or NumPy arrays."""
    function = getattr(function, "__wrapped__", function)
    code, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in getattr(code, "co_names", ()):
        module = getattr(variables.get(name), "__name__", "")
        if framework := _FRONT_ENDS.get(str(module).partition(".")[0]):
            yield framework


def _described(made: object) -> str:
    if made is None:
        return "None"
    if isinstance(made, tuple):
        if not made:
            return "an empty tuple"
        first = type(made[0]).__name__
        return f"a tuple that begins with {'an' if first[0] in 'aeiou' else 'a'} {first}, not with a function"
    name = type(made).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
