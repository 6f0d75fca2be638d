"""Every symbol of Dynamo and AOTAutograd that graph mode uses; ``tests/torch/test_torch_private.py`` checks each.

Importing this imports Dynamo, which takes a second or two: only graph mode does so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final, TypeAlias

import torch
import torch._decomp.decompositions
import torch._refs  # With the line above: all kernels in Python are there before they are taken away.
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    UserError,
    UserErrorType,
)
from torch._dynamo.variables import builder, user_defined
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext, tracing
from torch._logging._internal import trace_log
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, PythonFunctionalizeAPI
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from remat.core.collecting import without_collections
from remat.core.errors import UnsupportedStep
from remat.torch._backward_pass import counted_gradients
from remat.torch._dynamo import once_left_unsaid, weakly, with_code_of_its_own
from remat.torch._private import FakeTensorMode
from remat.torch.graph_mode import layouts
from remat.torch.graph_mode._answers import Answers
from remat.torch.graph_mode._branches import decided_branches
from remat.torch.graph_mode._hook_guards import guarded_together
from remat.torch.graph_mode._shape_rules import taken_as_by_kernels
from remat.torch.graph_mode.recurrent import lstm
from remat.torch.recompute import without_marks
from remat.torch.trace import aot_notes

__all__ = ["Backend", "BackendCompilerFailed", "TorchDynamoException"]

Partition: TypeAlias = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
CompilePart: TypeAlias = Callable[[fx.GraphModule], Callable[[list[Any]], Any]]

_engine: Any = torch._C
_LSTM: Any = torch.ops.aten.lstm.input

# The backward pass is compiled together with the forward pass, not when it first runs: memory is planned for both.
_AT_ONCE = {
    name: True for name in ("force_non_lazy_backward_lowering",) if hasattr(functorch_config, name)
}  # PyTorch 2.13 has it.

# What AOTAutograd calls to log its graphs, and what stands for it where nobody listens. PyTorch 2.13 has both.
_GRAPH_LOGS: Final[dict[str, Callable[..., Any]]] = {
    "_log_joint_graph": lambda *args, **kwargs: None,
    "_log_fw_bw_graphs": lambda *args, **kwargs: (None, None),
}

# Does PyTorch itself ask whether autograd would have taken an operator apart? PyTorch 2.13 does, 2.9 does not.
_KEEPS_OPERATORS_WHOLE: Final = hasattr(_python_dispatch, "autograd_would_have_decomposed")

# Kernels of these keys stand between the caller and the operators that eager PyTorch runs.
_ABOVE_OPERATORS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


class Backend:
    """A backend for ``torch.compile`` that has AOTAutograd trace a joint graph of eager PyTorch's own operators.

    Args:
        partition: is given the joint graph and makes a forward and a backward module of it.
        compile_forward: makes a function of the forward module; it takes a list of arguments, which it empties. It is a
            method, as the next two are, of an object that lives as long as captured functions are called.
        compile_backward: the same for the backward module.
        compile_alone: the same for a graph without a backward pass.
        takers_for: given the inputs of a captured graph, those of them whose gradients are taken as soon as they are
            final, by their places: each an object that is called with the gradient, and whose ``stand_in`` is given the
            input at each call, and makes what the graph is given in its place.
    """

    def __init__(
        self,
        partition: Partition,
        compile_forward: CompilePart,
        compile_backward: CompilePart,
        compile_alone: CompilePart,
        takers_for: Callable[[Sequence[Any]], dict[int, Any]],
    ) -> None:
        self._partition = partition
        self._takers_for = takers_for
        # Of the graph that is traced at present.
        self._names: Sequence[str] = ()
        self._takers: dict[int, Any] = {}
        self._stand_ins: dict[int, Any] = {}
        self._parts: list[int] = []
        self._static: Sequence[int] | None = None
        self._differentiated: Callable[..., Any] = aot_autograd(
            fw_compiler=_compiler(weakly(compile_forward)),
            bw_compiler=_compiler_of_backward_passes(weakly(compile_backward)),
            inference_compiler=_compiler(weakly(compile_alone)),
            partition_fn=weakly(self._part),
            decompositions={},
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """A function in place of a graph that Dynamo has captured."""
        examples = [_example(node) for node in module.graph.find_nodes(op="placeholder")]
        return self._function(module, inputs, examples, _input_names(module), None)

    def for_dynamo(self) -> Callable[..., Callable[..., Any]]:
        """The backend as Dynamo is given it: Dynamo keeps for good what it is given, and this keeps nothing alive."""
        backend = weakly(self.__call__)
        backend.__name__ = "aten"  # As Dynamo calls it where something fails.
        return backend

    def of_function(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str], static: Sequence[int]
    ) -> Callable[..., Any]:
        """A function in place of a module that is called with stand-ins, without Dynamo.

        Args:
            module: without parameters; it takes and returns tensors.
            inputs: that it will be called with first.
            names: of the inputs.
            static: places of the inputs that are the same in every step, parameters and buffers.

        Raises:
            Exception: whatever the module raises, or AOTAutograd.
        """
        with tracing(TracingContext(FakeTensorMode())), taken_as_by_kernels(), without_marks():
            return self._function(module, inputs, inputs, names, static)

    def _function(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Any],
        examples: Sequence[Any],
        names: Sequence[str],
        static: Sequence[int] | None,
    ) -> Callable[..., Any]:
        self._names, self._static, self._takers = names, static, self._takers_for(examples)
        self._stand_ins = {}
        with (
            _eager_kernels(),
            _eager_layouts(),
            _whole_operators(),
            functorch_config.patch(_AT_ONCE),
            without_collections(),
            _without_unread_logs(),
            counted_gradients() as self._parts,
        ):
            function: Callable[..., Any] = self._differentiated(module, inputs)
        found = self._stand_ins | self._takers
        return _with_stand_ins(function, found) if found else function

    def _part(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        aot_notes.note_inputs(joint, self._names, self._takers)
        aot_notes.note_parts(joint, options["num_fwd_outputs"], self._parts)
        if self._static is not None:
            options["static_lifetime_input_indices"] = list(self._static)
        forward, backward = self._partition(joint, joint_inputs, **options)
        self._stand_ins = dict(backward.meta.get(aot_notes.STAND_INS, {}))
        return forward, backward


def _compiler(compile_part: CompilePart) -> Callable[..., Any]:
    def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        function: Any = compile_part(module)
        function._boxed_call = True
        return function

    return run


def _compiler_of_backward_passes(compile_part: CompilePart) -> Callable[..., Any]:
    compiled = _compiler(compile_part)

    def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Otherwise AOTAutograd refuses ``retain_graph=True``.
            context.fw_metadata.bw_donated_idxs = []
        return compiled(module, inputs)

    return run


def _example(node: fx.Node) -> Any:
    """The tensor that an input of a captured graph was given."""
    return getattr(node.meta.get("grapharg"), "example", None)


def _with_stand_ins(function: Callable[..., Any], makers: dict[int, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        given = list(args)
        for place, maker in makers.items():
            given[place] = maker.stand_in(given[place])
        return function(*given)

    return run


# How Dynamo writes where an input comes from: ``L['self']._modules['0']._parameters['weight']``, ``L['x']``.
_IN_MODULE: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_ARGUMENT: Final = re.compile(r"^[LG]\['([^']+)'\]")


def _input_names(module: fx.GraphModule) -> list[str]:
    """Names of the inputs of a graph that Dynamo captured: those of parameters and buffers in their module."""
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        name: Any = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", node.name)
        name = str(name() if callable(name) else name)  # A method up to PyTorch 2.9.
        found.append(".".join(_IN_MODULE.findall(name)) or _ARGUMENT.sub(r"\1", name))
    return found


_WHILE_CAPTURING = {
    # Dynamo refuses recurrent layers otherwise.
    "allow_rnn": True,
    # Combinations of shapes, each with a plan of its own. A judgement: Dynamo's own limit, 8, is soon reached where the
    # length of sequences varies; each takes 12 MiB of a BERT of six layers. Beyond the limit other shapes run eagerly.
    "recompile_limit": 64,
    # Dynamo would look for garbage after each capture: of a GPT-2 of 24 layers that is half a second for nothing.
    "run_gc_after_compile": False,
    # Dynamo would take it that modules under ``fully_shard`` stay as they are, in training say.
    "skip_fsdp_guards": False,
    # Nor would it notice that a hook was added to a module after the capture, or taken away. ``_hook_guards`` puts
    # others in the place of these guards.
    "skip_nnmodule_hook_guards": False,
    # Dynamo would pass these guards by while the dictionaries around them are as they were. PyTorch 2.9 does so by
    # itself, 2.13 does not: before Python 3.12 such dictionaries may be gone.
    "use_recursive_dict_tags_for_guards": False,
    # Dynamo would turn NumPy into PyTorch, whose random numbers are others: transformers' Wav2Vec2 draws a mask so.
    "trace_numpy": False,
}
_IN_ONE_GRAPH = {
    # Numbers that the step computes with stay in the graph, as they do by themselves from PyTorch 2.13 on. One that
    # decides something, a branch say, ends the capture.
    "capture_scalar_outputs": True,
}


@cache
def _settings(fullgraph: bool) -> dict[str, object]:
    """Those that this version of PyTorch has."""
    settings = {**_WHILE_CAPTURING, **(_IN_ONE_GRAPH if fullgraph else {})}
    return {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}


_ListOfAClass: Any = user_defined.UserDefinedListVariable
_as_any_variable: Any = _ListOfAClass.as_proxy


def _as_plain_list(variable: Any) -> Any:
    """What stands in the captured graph for a list of a class of its own that is an operator's argument.

    Dynamo knows that of dictionaries and tuples, not of lists. Keras' layers keep axes in such lists.
    """
    items = getattr(variable, "_base_vt", None)
    return _as_any_variable(variable) if items is None else list(items.as_proxy())


_builder: Any = builder
_optimize: Any = eval_frame.optimize


class ChangingNumbers:
    """Python's floats that captured code reads and that were another at a later capture: the weight of a loss, say.

    Dynamo captures a step for one value of each number. One that changed is an input of the next capture.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._changing: set[str] = set()

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Inside, Dynamo makes inputs of them."""
        own = _builder.process_automatic_dynamic

        def processed(translator: Any, name: str, entry: Any, **options: Any) -> Any:
            value = entry.scalar
            found = own(translator, name, entry, **options)
            if type(value) is float:
                if self._first.setdefault(name, value) != value:
                    self._changing.add(name)
                if name in self._changing:
                    return _builder.FrameStateSizeEntry(scalar=_builder.auto_dynamic)
            return found

        _builder.process_automatic_dynamic = processed
        try:
            yield
        finally:
            _builder.process_automatic_dynamic = own


@contextmanager
def capturing(answers: Answers, numbers: ChangingNumbers, *, fullgraph: bool) -> Iterator[None]:
    """Inside, Dynamo captures what graph mode can run.

    Args:
        answers: for captured code that asks whether it is being compiled.
        numbers: those that change from call to call.
        fullgraph: is the function captured as one graph, or not at all?
    """
    settings = _settings(fullgraph)
    before = {name: getattr(dynamo_config, name) for name in settings}
    for name, value in settings.items():
        setattr(dynamo_config, name, value)
    _ListOfAClass.as_proxy = _as_plain_list
    try:
        with (
            answers.given(),
            numbers.noticed(),
            decided_branches(),
            guarded_together(),
            taken_as_by_kernels(),
            once_left_unsaid(),
        ):
            yield
    finally:
        _ListOfAClass.as_proxy = _as_any_variable
        for name, value in before.items():
            setattr(dynamo_config, name, value)


def compiled(
    fn: Callable[..., Any],
    backend: Backend,
    surroundings: Callable[[], AbstractContextManager[None]],
    *,
    fullgraph: bool,
) -> Callable[..., Any]:
    """What ``torch.compile`` makes of a function.

    Args:
        fn: the function.
        backend: what becomes of captured graphs.
        surroundings: makes contexts in which Dynamo captures. A call that needs no capture has none around it: to
            enter and leave them takes 300 us.
        fullgraph: is the function captured as one graph, or not at all?

    Raises:
        TooManyShapes: by what is returned, for shapes that no captured graph is for once there are too many graphs.
    """
    dynamo = _optimize(backend.for_dynamo(), nopython=fullgraph, dynamic=False)
    if hasattr(dynamo, "callback"):  # Else Dynamo is switched off.
        dynamo.callback = _Capture(dynamo.callback, surroundings)
    captured = dynamo(with_code_of_its_own(fn))

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with without_marks():
                return captured(*args, **kwargs)
        except FailOnRecompileLimitHit:
            number = _WHILE_CAPTURING["recompile_limit"]
            raise TooManyShapes(f"{number} graphs were captured, for other shapes each") from None
        except RuntimeError as error:
            if not fullgraph or _SKIPPED not in str(error):
                raise
            raise _not_captured("Dynamo passes its code by since an earlier capture of it failed") from None

    return run


class TooManyShapes(Exception):
    """Dynamo captures no more graphs of a function. Those that there are run on."""


_SKIPPED: Final = "found no compiled frames"
"""What PyTorch says where code is to be captured as one graph that it has marked as not to be looked at."""


def _not_captured(reason: str) -> TorchDynamoException:
    """What Dynamo itself says where control flow keeps it from capturing a function."""
    return UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, reason)


class _Capture:
    """What Dynamo calls for a frame that no captured code is for."""

    def __init__(self, callback: Any, surroundings: Callable[[], AbstractContextManager[None]]) -> None:
        # Dynamo looks for its backend under this name.
        self._torchdynamo_orig_backend = callback
        self._surroundings = surroundings

    def __call__(self, *args: Any) -> Any:
        with self._surroundings():
            try:
                return self._torchdynamo_orig_backend(*args)
            except GuardOnDataDependentSymNode as error:
                # PyTorch 2.13 lets it pass where a number of elements is a condition, as in ``if len(x.nonzero())``.
                why = str(error).splitlines()[0]
                raise _not_captured(f"a number that depends on values is a condition: {why}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_torchdynamo_orig_backend"], name)


@contextmanager
def _without_unread_logs() -> Iterator[None]:
    """Inside, AOTAutograd does not write its graphs out as text where nobody listens.

    It writes them before it asks whether anybody does: of a GPT-2 of 24 layers, one second of 20.
    """
    names = [name for name in _GRAPH_LOGS if hasattr(graph_compile, name)]
    if _hears_graphs():
        names = []
    own = {name: getattr(graph_compile, name) for name in names}
    for name in names:
        setattr(graph_compile, name, _GRAPH_LOGS[name])
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(graph_compile, name, function)


def _hears_graphs() -> bool:
    """Does anybody listen to AOTAutograd's logs of graphs (``TORCH_LOGS``, ``TORCH_TRACE``)?"""
    loggers = [getattr(graph_compile, name, None) for name in ("aot_joint_log", "aot_graphs_log")]
    return bool(trace_log.handlers) or any(one is not None and one.isEnabledFor(logging.INFO) for one in loggers)


@contextmanager
def _eager_kernels() -> Iterator[None]:
    """Inside, what PyTorch writes in Python about an operator does not replace what it does in C++.

    While it traces, PyTorch asks kernels in Python first: dropout, products of many dimensions and resampling then
    become other operators than eager PyTorch runs, and gradients differ in their last bits.
    """
    removed: list[tuple[OpOverload, DispatchKey, Any]] = []
    try:
        for packet in list(vars(torch.ops.aten).values()):
            if not isinstance(packet, OpOverloadPacket):
                continue
            for overload in list(vars(packet).values()):
                if isinstance(overload, OpOverload):
                    for key in _ABOVE_OPERATORS:
                        kernel = overload.py_kernels.pop(key, None)
                        if kernel is not None:
                            removed.append((overload, key, kernel))
                            overload._dispatch_cache.clear()
        for key in _ABOVE_OPERATORS:
            _LSTM.py_kernels[key] = lstm
        _LSTM._dispatch_cache.clear()
        yield
    finally:
        for key in _ABOVE_OPERATORS:
            _LSTM.py_kernels.pop(key, None)
        _LSTM._dispatch_cache.clear()
        for overload, key, kernel in removed:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


_taken_apart: Any = OpOverload.decompose


def _taken_apart_as_by_autograd(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What AOTAutograd asks for the parts of an operator. One that the device has a kernel for stays whole."""
    device = next((one.device.type for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)), None)
    if device is not None:
        key = _engine._parse_dispatch_key(_engine._dispatch_key_for_device(device))
        if _engine._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return NotImplemented
    return _taken_apart(func, *args, **kwargs)


@contextmanager
def _whole_operators() -> Iterator[None]:
    """Inside, operators with a kernel of their own stay whole, as autograd leaves them; PyTorch 2.13 does so by itself.

    PyTorch 2.9 makes eight operators of ``silu_backward``, with other last bits than the one that eager PyTorch runs.
    """
    operator: Any = OpOverload
    if _KEEPS_OPERATORS_WHOLE:
        yield
        return
    operator.decompose = _taken_apart_as_by_autograd
    try:
        yield
    finally:
        operator.decompose = _taken_apart


_functionalize: Any = FunctionalTensorMode.__torch_dispatch__
_values: Any = PythonFunctionalizeAPI()


def _functionalize_in_place(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What AOTAutograd does with an operator. Where it wrote in place, the values stay in the layout they lay in."""
    result = _functionalize(mode, func, types, args, kwargs)
    written = args[0] if args else None
    if isinstance(func, OpOverload) and isinstance(written, FunctionalTensor) and _writes_in_place(func):
        (values,) = _values.unwrap_tensors([written])
        if written.shape == values.shape and layouts.differ(written, values):
            _values.replace(written, layouts.laid_out(values, written.stride()))
            _values.commit_update(written)
            _values.sync(written)
    return result


@cache
def _writes_in_place(func: OpOverload) -> bool:
    """Does an operator return its first argument, to which it writes? Those that move data elsewhere do not count."""
    first = func._schema.arguments[0].alias_info
    is_plain = torch.Tag.inplace_view not in func.tags
    return is_plain and func._schema.name.endswith("_") and first is not None and first.is_write


@contextmanager
def _eager_layouts() -> Iterator[None]:
    """Inside, what is written in place into a part of a tensor lies as in eager PyTorch; see ``layouts``."""
    mode: Any = FunctionalTensorMode
    mode.__torch_dispatch__ = _functionalize_in_place
    try:
        yield
    finally:
        mode.__torch_dispatch__ = _functionalize


def refuse_second_derivatives() -> None:
    """Inside the backward pass of a captured step: its gradients cannot be differentiated again, and say what can be.

    AOTAutograd makes a function of the whole backward pass, whose own backward pass is an error that names no way out.
    """
    node = _engine._current_autograd_node()

    def hook(gradients: Sequence[Any], _: Any) -> None:
        handle.remove()
        for one in gradients:
            function: Any = getattr(getattr(one, "grad_fn", None), "_forward_cls", None)
            if function is not None:
                function.backward = staticmethod(_refused)

    handle = node.register_hook(hook)


def _refused(*args: Any) -> None:
    raise UnsupportedStep(
        "gradients of a step in graph mode cannot be differentiated again (create_graph=True), since its operators run "
        'below autograd: run this step under remat.torch.apply, or remat.torch.limit_memory with mode="eager"'
    )


def runs_eagerly() -> bool:
    """Has somebody asked for captured functions to run as they are (``torch.compiler.set_stance``)?"""
    return eval_frame._stance.stance == "force_eager"


def below_autograd() -> Any:
    """A context in which operators go straight to their kernels: nothing is noted for a backward pass."""
    return _engine._AutoDispatchBelowAutograd()
