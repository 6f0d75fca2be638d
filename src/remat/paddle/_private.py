"""Every private symbol of Paddle that remat reaches for, each in one function, so that a release can move it.

``tests/paddle/test_paddle_private.py`` checks each of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import paddle
from paddle.base import core, framework
from paddle.base import executor as executor_module
from paddle.base.libpaddle import pir
from paddle.jit.dy2static.pir_partial_program import PartialProgramLayerHook

# --- Programs -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def insertion_point_kept() -> Iterator[None]:
    """Operators that are made after this stand where they would have stood without it."""
    before = pir.get_current_insertion_point()
    try:
        yield
    finally:
        pir.set_insertion_point(before)


def insert_before(op: Any) -> None:
    """Operators that are made from here on stand before ``op``."""
    pir.set_insertion_point(op)


def copy(op: Any, values: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of an operator, at the insertion point, that reads new values for old ones."""
    mapping = pir.IrMapping()
    for old, new in values:
        mapping.add(old, new)
    return op.clone(mapping, pir.CloneOptions(False, True, True))


def op_id(op: Any) -> int:
    """What tells operators of a program apart: Python's own objects for them come and go."""
    return int(op.id())


def copy_of_value(value: Any) -> Any:
    """A value with the same numbers in bytes of its own."""
    return paddle._C_ops.assign(value)


def dropout_by_mask(mask: Any, value: Any, rate: Any, attributes: Mapping[str, Any]) -> Any:
    """What a dropout makes of a value with a mask that was drawn before."""
    return paddle._C_ops.dropout_grad(mask, value, rate, attributes["is_test"], attributes["mode"])


class PythonOp:
    """An operator that calls a function of Python's, takes nothing and returns nothing.

    Args:
        name: which no other such operator of the process has.
        function: what it calls; it lives as long as the process, since the operator holds no reference to it.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        def run() -> tuple[()]:
            function()
            return ()

        self._name = name
        self._attributes = {"infer_meta_fn_ptr": tuple, "fn_ptr": run}
        _called_by_operators.append(self._attributes)

    def insert(self) -> None:
        """Insert it at the insertion point."""
        paddle._C_ops._run_python_op(
            name=self._name, input_names=[], output_names=[], attrs=self._attributes, inplace_map={}
        )


_called_by_operators: list[Any] = []


def needs_no_bytes(op: Any, value: Any) -> bool:
    """Does an operator need of a value no more than its shape?"""
    return bool(op.is_no_need_buffer(value))


def in_place_results(op: Any) -> dict[int, int]:
    """For each result that is written into an operand's bytes, by its place, the place of the operand."""
    if not str(op.name()).endswith("_"):
        return {}
    return {int(result): int(operand) for result, operand in pir.get_op_inplace_info(op).items()}


def types_in_list(value: Any) -> list[tuple[tuple[int, ...], Any]] | None:
    """Shape and data type of each tensor of a list; None for a value that is no list."""
    kind = value.type()
    if not kind.as_vec_type():
        return None
    found = []
    for one in kind.as_vec_type().as_list():
        found.append((tuple(int(size) for size in one.shape), one.dtype))
    return found


def source_of(op: Any) -> str:
    """The line of the user's program that made an operator, "model.py:12 in forward"; "" where it is unknown."""
    try:
        lines = op.attrs().get("op_callstack") or ()
    except (RuntimeError, ValueError):
        return ""
    for line in reversed(lines):
        if found := _LINE.match(line):
            path, number, name = found.groups()
            if not path.startswith(_OWN_FOLDERS):
                return f"{path.rpartition('/')[2]}:{number} in {name}"
    return ""


_OWN_FOLDERS: Final = (os.path.dirname(paddle.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_LINE: Final = re.compile(r'\s*File "([^"]+)", line (\d+), in (\S+)')


def persists(op: Any) -> bool:
    """Is the input of a program kept from step to step, as the state of an optimizer is?"""
    return any(bool(one) for one in op.attrs().get("persistable", ()))


def is_on_gpu() -> bool:
    """Does Paddle run what comes next on a GPU?"""
    return str(paddle.get_device()).startswith("gpu")


def wait() -> None:
    """Until the device has done what it was given."""
    if is_on_gpu():
        paddle.device.synchronize()


def uses_onednn() -> bool:
    """Does Paddle run oneDNN's kernels on the CPU?"""
    found = paddle.get_flags(["FLAGS_use_mkldnn"])
    return bool(found["FLAGS_use_mkldnn"])


# --- Memory ---------------------------------------------------------------------------------------------------------

_COUNTER: Final = "Allocated"


def allocated_bytes() -> int:
    """Bytes that Paddle's CPU allocator has given out."""
    return int(core.host_memory_stat_current_value(_COUNTER, 0))


def reset_peak() -> None:
    """Let the counter of the peak begin anew, at what is allocated now."""
    core.host_memory_stat_reset_peak_value(_COUNTER, 0)


def peak_bytes() -> int:
    """The largest number of bytes allocated at once since the last reset."""
    return int(core.host_memory_stat_peak_value(_COUNTER, 0))


# --- Executors ------------------------------------------------------------------------------------------------------

IN_ORDER: Final = "FLAGS_new_executor_sequential_run"
ONE_THREAD: Final = "FLAGS_new_executor_serial_run"
MERGES_COPIES: Final = "FLAGS_enable_cse_in_dy2st"

Executor: Any = paddle.static.Executor


def flags(*names: str) -> dict[str, Any]:
    """The values of flags of the process."""
    return dict(paddle.get_flags(list(names)))


def set_flags(values: Mapping[str, Any]) -> None:
    """Set flags of the process."""
    paddle.set_flags(dict(values))


def program_of_run(program: Any) -> Any:
    """The program that ``Executor.run`` means by its argument."""
    if program is None:
        return paddle.static.default_main_program()
    return getattr(program, "_program", program)


def was_run(program: Any) -> bool:
    """Does some executor hold a compiled form of the program?"""
    cached = executor_module._ExecutorCache._CachedData
    return any(type(one) is cached and one.program is program for one in gc.get_objects())


# --- Autograd -------------------------------------------------------------------------------------------------------

_hooks: list[tuple[Any, Any]] = []
"""The hooks for saved tensors that are in force, the newest last. Paddle itself remembers one pair only."""


def has_hooks() -> bool:
    """Does remat see what autograd saves at this moment?"""
    return bool(_hooks)


@contextlib.contextmanager
def saved_tensors_hooks(pack: Any, unpack: Any) -> Iterator[None]:
    """What autograd saves inside goes through ``pack``; what was in force before is in force again afterwards."""
    if _hooks:
        core.eager.reset_saved_tensors_hooks()
    _hooks.append((pack, unpack))
    core.eager.register_saved_tensors_hooks(pack, unpack)
    try:
        yield
    finally:
        _hooks.pop()
        core.eager.reset_saved_tensors_hooks()
        if _hooks:
            core.eager.register_saved_tensors_hooks(*_hooks[-1])


_keeps_graph: list[bool] = []
"""For each backward pass that runs at this moment: may another one follow through the same graph?"""


def graph_is_kept() -> bool:
    """May another backward pass follow through the graph of the one that runs now? Yes where none is known to run."""
    return not _keeps_graph or any(_keeps_graph)


@functools.cache
def watch_backward_passes() -> None:
    """From here on ``graph_is_kept`` knows of every backward pass, whoever starts it."""
    # The place of ``retain_graph`` among the arguments, which Paddle gives by position.
    for name, place in (("run_backward", 2), ("run_partial_grad", 3)):
        setattr(core.eager, name, _noting(getattr(core.eager, name), place))


def _noting(plain: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        _keeps_graph.append(bool(args[place]))
        try:
            return plain(*args)
        finally:
            _keeps_graph.pop()

    return run


def autocast_state() -> dict[str, Any] | None:
    """The arguments of ``paddle.amp.auto_cast`` that are in force; None where it is off."""
    tracer = framework._dygraph_tracer()
    level = tracer._amp_level
    if level == core.AmpLevel.O0:
        return None
    white, black = tracer._get_amp_op_list()
    return {
        "custom_white_list": white,
        "custom_black_list": black,
        "level": {core.AmpLevel.O1: "O1", core.AmpLevel.O2: "O2"}.get(level, "OD"),
        "dtype": tracer._amp_dtype,
    }


@contextlib.contextmanager
def autocast_like(state: Mapping[str, Any] | None) -> Iterator[None]:
    """The autocast of another time."""
    with paddle.amp.auto_cast(enable=state is not None, **(state or {})):
        yield


@contextlib.contextmanager
def statistics_left_alone() -> Iterator[None]:
    """Batch normalisations inside move copies of their running statistics."""
    before = {}

    def on_copies(plain: Any) -> Any:
        def run(x: Any, mean: Any, variance: Any, *rest: Any) -> Any:
            return plain(x, mean.clone(), variance.clone(), *rest)

        return run

    for name in ("batch_norm", "batch_norm_", "sync_batch_norm_"):
        if (plain := getattr(paddle._C_ops, name, None)) is not None:
            before[name] = plain
            setattr(paddle._C_ops, name, on_copies(plain))
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(paddle._C_ops, name, plain)


def arguments_of_run(run: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of ``Executor.run`` by name."""
    return dict(inspect.signature(run).bind(*args, **kwargs).arguments)


def gradient_of(parameter: Any) -> Any:
    """The gradient of a parameter, which stays when that of the parameter is set to something else; None for none."""
    gradient = parameter.grad
    if gradient is None:
        return None
    # Everything else that Paddle offers shares more than the bytes, and loses them when the gradient is set to None.
    shared = core.eager.Tensor(
        gradient.dtype, gradient.shape, f"{gradient.name}_remat", core.VarDesc.VarType.DENSE_TENSOR, False
    )
    gradient._share_buffer_to(shared)
    shared.stop_gradient = True
    return shared


@contextlib.contextmanager
def gradients_put_aside() -> Iterator[None]:
    """Gradients that a backward pass inside makes are thrown away; earlier ones are as they were."""
    before: dict[int, tuple[Any, Any]] = {}
    for one in gc.get_objects():
        if type(one) is framework.EagerParamBase and not one.stop_gradient:
            before[id(one)] = one, gradient_of(one)
            one.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.values():
            parameter.grad = gradient


# --- to_static ------------------------------------------------------------------------------------------------------


class StaticFunction:
    """A function under ``paddle.jit.to_static``, with a hook in each of its programs.

    Args:
        function: what is called. Whoever holds this holds the object of a method.
        hook: takes a joint program, the place where its forward pass ends, and the place where its backward pass
            begins; returns where the forward pass ends afterwards. What stands between is cut out.

    Attributes:
        leaves: the parameters that the newest program reads.
    """

    def __init__(self, function: Any, hook: Callable[[Any, int, int], int]) -> None:
        called = _Called(function)

        def call(args: Any, kwargs: Any, modes: Any) -> Any:
            return called.function(*args, **kwargs)

        self.leaves: list[Any] = []
        self._static = paddle.jit.to_static(call, full_graph=True)
        plain = self._static.get_concrete_program
        ours = _Hook(hook)

        def get_concrete_program(*args: Any, **kwargs: Any) -> Any:
            concrete, partial = plain(*args, **kwargs)
            if ours not in partial._hookers:
                partial.add_hooker(ours)
            self.leaves = list(partial._params)
            return concrete, partial

        self._static.get_concrete_program = get_concrete_program

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: str) -> Any:
        """Run the forward pass. Calls that differ in ``modes`` have programs of their own."""
        return self._static(list(args), kwargs, modes)

    def make_program(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: str) -> Any:
        """Make the program of a call if it is new, which calls the hook; nothing runs. Returns what stands for it."""
        _, partial = self._static.get_concrete_program(list(args), kwargs, modes, is_train=True)
        assert partial.train_program is not None, "it is made when it is asked for"
        return partial


class _Called:
    """What ``to_static`` converts, without the object of a method.

    Paddle keeps what it has converted for as long as the function lives that it was converted from. If a layer held
    that function, and what was converted the layer, both would stay for good.
    """

    def __init__(self, function: Any) -> None:
        self._itself = weakref.WeakMethod(function) if isinstance(function, types.MethodType) else lambda: function

    @property
    def function(self) -> Any:
        return self._itself()


class _Hook(PartialProgramLayerHook):  # type: ignore[misc]
    def __init__(self, hook: Callable[[Any, int, int], int]) -> None:
        self._hook = hook

    def after_append_backward(
        self,
        whole_program: Any,
        inputs: Any,
        src_vars: Any,
        grad_outputs: Any,
        forward_end_idx: int,
        backward_start_idx: int,
    ) -> tuple[Any, int, Any]:
        """Called with the joint program before it is cut in two."""
        return whole_program, self._hook(whole_program, forward_end_idx, backward_start_idx), src_vars
