"""Symbols of PyTorch that are not documented: each fails here first when a release moves it."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.profiler import ProfilerActivity, profile

import remat.torch
from remat.torch import _backward_pass, _private
from remat.torch.trace import op_facts


class Seen(_private.TorchDispatchMode):
    """Runs a function inside of each operator."""

    def __init__(self, look):
        super().__init__()
        self.look, self.found = look, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.found.append((func.name(), self.look(out)))
        return out


def test_a_storage_is_one_object_as_long_as_it_lives():
    x = torch.randn(4)
    storage = x.untyped_storage()
    weak, key = _private.weak(storage), _private.storage_key(storage)
    del storage
    gc.collect()
    assert weak() is x.view(2, 2).untyped_storage()
    assert _private.storage_key(x[1:].untyped_storage()) == key
    del x
    assert weak() is None


def test_an_alias_shares_the_version_and_holds_no_graph():
    x = torch.randn(4, requires_grad=True)
    with Seen(_private.alias) as seen:
        y = x.exp()
    (_, alias), *_ = seen.found
    with torch.no_grad():
        y.add_(1)
    assert alias._version == y._version == 1
    assert alias.grad_fn is None
    assert alias.data_ptr() == y.data_ptr()


def test_the_backward_pass_tells_where_it_is():
    x = torch.randn(4, requires_grad=True)
    numbers = []
    with Seen(lambda out: _private.forward_sequence_number()) as seen:
        y = x.exp()
    assert not _private.in_backward_pass()
    assert _private.running_node() is None
    kept = []
    y.register_hook(lambda g: kept.append((_private.in_backward_pass(), _private.keeps_graph())))
    with Seen(lambda out: _private.running_node()) as backward:
        y.sum().backward(retain_graph=True)
    numbers = dict(node for _, node in backward.found if node is not None)
    assert numbers["ExpBackward0"] == seen.found[0][1]
    y.sum().backward()
    assert kept == [(True, True), (True, False)]


def test_operators_run_below_autograd_and_autocast():
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), _private.BelowAutograd():
            _private.enable_grad(True)
            y = torch.ops.aten.mm.default(x, x)
            assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype is torch.float32
    assert y.grad_fn is None


def test_schemas():
    aten = torch.ops.aten
    x = torch.randn(3)
    assert _private.is_mutable(aten.relu_.default)
    assert _private.written_arguments(aten.add_.Tensor, (x, x.clone()), {}) == [x]
    assert _private.generator_argument(aten.bernoulli_.float) == 2
    assert _private.generator_argument(aten.native_dropout.default) is None
    assert _private.flop_formula(aten.mm.default) is not None
    assert _private.is_silent(torch.ops.prim.device.default)


def test_reductions_are_told_with_and_without_their_tag(monkeypatch):
    aten = torch.ops.aten
    told = {
        func: _private.is_reduction(func)
        for func in (aten.sum.dim_IntList, aten.max.dim, aten.max.other, aten.mm.default)
    }
    assert list(told.values()) == [True, True, False, False]

    class NoTag:
        pointwise = torch.Tag.pointwise

    monkeypatch.setattr(_private.torch, "Tag", NoTag)
    assert {func: _private.is_reduction(func) for func in told} == told


def test_what_draws_at_random():
    aten, x = torch.ops.aten, torch.randn(2, 2, 4, 4)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not op_facts.is_random(attention, (x, x, x), {})
    assert op_facts.is_random(attention, (x, x, x, 0.1), {})
    assert op_facts.is_random(aten.bernoulli_.float, (x, 0.5), {})
    assert not op_facts.may_repeat(aten.nonzero.default, (x,), {}, on_gpu=False)
    assert not op_facts.may_repeat(aten.index_put.default, (x, [], x), {}, on_gpu=True)


def test_the_profiler_tells_allocations():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        x = torch.empty(1 << 18)
        del x
    sizes = [size for _, size in _private.memory_events(profiled)]
    assert sizes == [1 << 20, -(1 << 20)]


def test_fake_tensors_take_no_modes_inside():
    with _private.FakeTensorMode():
        assert isinstance(torch.zeros(2), _private.FakeTensor)
        with _private.no_modes():
            assert type(torch.zeros(2)) is torch.Tensor


def test_the_lines_of_inductors_code_tell_what_is_allocated():
    from torch.fx.experimental.proxy_tensor import make_fx

    from remat.torch.compiled.inductor_peak import peak_bytes

    def forward(primals_1, primals_2):
        return (torch.relu(primals_1 @ primals_2) @ primals_2,)

    inputs = [torch.randn(64, 64) for _ in range(2)]
    module = make_fx(forward, tracing_mode="fake")(*inputs)
    # The first product is made, turned into its relu in place, and beside it the second product.
    assert peak_bytes([module]) == 2 * 64 * 64 * 4


def test_an_lstm_is_composed_of_other_operators():
    layer, x, states = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3), [torch.zeros(1, 2, 4) for _ in range(2)]
    rest = (True, 1, 0.0, False, False, False)
    found = _private.run_composite(torch.ops.aten.lstm.input, x, states, list(layer.parameters()), *rest)
    torch.testing.assert_close(found[0], layer(x)[0])


def test_data_parallel_says_what_comes_before_and_after_its_module():
    names = ("_pre_forward", "_post_forward")
    assert all(callable(getattr(torch.nn.parallel.DistributedDataParallel, name)) for name in names)


def test_inductor_works_each_stride_out_once():
    from sympy import Integer, Symbol
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    from remat.torch.compiled import _inductor

    row, own = Symbol("x0", integer=True), cpp.stride_at_vec_range
    with _inductor.strides_remembered():
        assert cpp.stride_at_vec_range is not own
        assert cpp.stride_at_vec_range(64 * row + 1, row, 16) == own(64 * row + 1, row, 16) == Integer(64)
        assert cpp.stride_at_vec_range.cache_info().maxsize is None
        asked_in_turn = sizevars if hasattr(sizevars, "stride_at") else cpp  # PyTorch 2.9.
        assert asked_in_turn.stride_at.cache_info().currsize == 1
    assert cpp.stride_at_vec_range is own


def test_a_storage_without_memory_hands_out_no_address():
    storage = _private.storage_without_memory(4096, torch.device("cpu"))
    tensor = torch.empty(0).set_(storage, 0, (32, 32), (32, 1))
    assert tensor.untyped_storage().nbytes() == 4096
    assert not _private.has_memory(tensor[1:].untyped_storage())
    assert _private.has_memory(torch.zeros(3).untyped_storage())
    with pytest.raises(RuntimeError) as caught:
        tensor.numpy()
    assert _private.is_access_to_data(caught.value)


def test_backward_passes_can_be_surrounded():
    seen = []

    def around(run):
        seen.append("before")
        result = run()
        seen.append("after")
        return result

    _backward_pass.around_backward_passes(around)
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    _backward_pass.no_longer_around_backward_passes(around)
    x.sum().backward()
    assert seen == ["before", "after"] * 2


@pytest.mark.parametrize("activation", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_what_autograd_leaves_whole_stays_whole_while_aotautograd_traces(monkeypatch, activation):
    from remat.torch.graph_mode import _aot

    func = getattr(torch.ops.aten, f"{activation.__name__}_backward").default
    x = torch.randn(4)
    expected = func(x, x)
    monkeypatch.setattr(_aot, "_KEEPS_OPERATORS_WHOLE", False)  # As on PyTorch 2.9.
    with _aot._whole_operators():
        assert func.decompose(x, x) is NotImplemented
        # Eager PyTorch has no kernel for it.
        assert torch.ops.aten.matmul.default.decompose(x, x) is not NotImplemented
    torch.testing.assert_close(func.decompose(x, x), expected)
    limited = remat.torch.limit_memory(lambda x: activation(x).square().sum(), "100%", mode="graph")
    y = x.clone().requires_grad_()
    limited(y).backward()
    activation(x.requires_grad_()).square().sum().backward()
    assert torch.equal(y.grad, x.grad)


def test_while_aotautograd_traces_no_kernel_in_python_stands_in_for_pytorchs_own():
    from remat.torch.graph_mode import _answers, _aot

    dropout, lstm = torch.ops.aten.dropout.default, torch.ops.aten.lstm.input
    before = dict(dropout.py_kernels), dict(lstm.py_kernels)
    assert all(key in before[0] for key in _aot._ABOVE_OPERATORS)
    with _aot._eager_kernels():
        assert not any(key in dropout.py_kernels for key in _aot._ABOVE_OPERATORS)
        kernels = [lstm.py_kernels[key] for key in _aot._ABOVE_OPERATORS]
        assert {kernel.__module__ for kernel in kernels} == {"remat.torch.graph_mode.recurrent"}
    assert (dropout.py_kernels, lstm.py_kernels) == before
    assert not _aot.dynamo_config.allow_rnn

    def answers():
        return [_answers.functions_of_torch.tracing_state_functions()[question] for question in _answers.QUESTIONS]

    assert answers() == [True] * len(_answers.QUESTIONS)
    with _aot.capturing(_answers.Answers(), _aot.ChangingNumbers(), fullgraph=True):
        assert answers() == [False] * len(_answers.QUESTIONS)
        assert all(getattr(_aot.dynamo_config, name) == value for name, value in _aot._WHILE_CAPTURING.items())
    assert answers() == [True] * len(_answers.QUESTIONS)
    assert not _aot.dynamo_config.allow_rnn


def test_dynamo_captures_inside_of_a_context_and_guards_hooks_by_one_check():
    from contextlib import nullcontext

    from torch._dynamo.guards import GuardBuilder

    from remat.torch.graph_mode import _aot, _hook_guards

    context = _aot._optimize(lambda module, inputs: module, nopython=True, dynamic=False)
    assert callable(context.callback)
    with _aot.capturing(_aot.Answers(), _aot.ChangingNumbers(), fullgraph=True):
        assert getattr(GuardBuilder, _hook_guards._GUARD).__name__ == _hook_guards._GUARD
        assert getattr(GuardBuilder, _hook_guards._GUARD).__wrapped__ is not None
    assert not hasattr(getattr(GuardBuilder, _hook_guards._GUARD), "__wrapped__")
    assert len(_hook_guards._GLOBAL_HOOKS) >= 4
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(print)
    check = _hook_guards.Unhooked()
    check.add((), "_forward_hooks")
    check.add(("0",), "_forward_pre_hooks")
    assert check(model)
    check.add(("0",), "_forward_hooks")
    assert not check(model)
    assert isinstance(_aot._Capture(context.callback, nullcontext)._torchdynamo_orig_backend, type(context.callback))


def test_while_aotautograd_traces_what_is_written_in_place_keeps_its_layout():
    from remat.torch.graph_mode import _aot, layouts

    own = _aot.FunctionalTensorMode.__torch_dispatch__

    def written(wide):
        part = torch.ops.aten.unsafe_split.Tensor(wide, 4, 1)[0]
        part.add_(1)
        return part

    def strides():
        return dispatch_functionalize(written)(torch.randn(4, 12)).stride()

    assert strides() == (4, 1)
    with _aot._eager_layouts():
        assert strides() == (12, 1)
    assert _aot.FunctionalTensorMode.__torch_dispatch__ is own
    assert layouts.in_place_form(torch.ops.aten.add.Tensor) is torch.ops.aten.add_.Tensor
    assert layouts.in_place_form(torch.ops.aten.mm.default) is None


def test_aotautograds_logs_of_graphs_are_left_out_where_nobody_listens(monkeypatch):
    from remat.torch.graph_mode import _aot

    names = [name for name in _aot._GRAPH_LOGS if hasattr(_aot.graph_compile, name)]
    assert names == list(_aot._GRAPH_LOGS) or torch.__version__ < (2, 13)
    own = [getattr(_aot.graph_compile, name) for name in names]
    monkeypatch.setattr(_aot.trace_log, "handlers", [])
    assert not _aot._hears_graphs()
    with _aot._without_unread_logs():
        assert [getattr(_aot.graph_compile, name) for name in names] == [_aot._GRAPH_LOGS[name] for name in names]
    assert [getattr(_aot.graph_compile, name) for name in names] == own
    monkeypatch.setattr(_aot.graph_compile.aot_graphs_log, "isEnabledFor", lambda level: True)
    with _aot._without_unread_logs():
        assert [getattr(_aot.graph_compile, name) for name in names] == own


def test_operators_are_bound_to_functions():
    from remat.torch.graph_mode import _aot

    names = {name for owner in _private.BOUND_FUNCTIONS for name in dir(owner)}
    assert {"mm", "addmm", "gelu", "view", "native_layer_norm"} <= names
    x = torch.ones(2, requires_grad=True)
    with _aot.below_autograd():
        assert (x * 2).grad_fn is None


def test_modules_carry_what_is_known_of_them():
    # What AOTAutograd hands to a compiler tells which capture it belongs to.
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = torch.fx.GraphModule({}, graph)
    module.meta["remat_step"] = 3
    assert copy.deepcopy(module).meta["remat_step"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whether_onednn_computes_in_half_precision(dtype):
    x, weight = torch.randn(8, 16, 32, 32, dtype=dtype), torch.randn(24, 16, 3, 3, dtype=dtype)
    backend = torch._C._select_conv_backend(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert _private.onednn_computes(dtype) == (backend == torch._C._ConvBackend.Mkldnn)


def test_what_a_call_allocates():
    x = torch.ones(1000)
    changes = _private.allocations(lambda: (x + x) * x)
    assert changes == [4000, 4000, -4000]
    # A profiler of the caller's own is not in the way, and sees nothing of it.
    with torch.profiler.profile(profile_memory=True) as profiled, torch.no_grad():
        assert _private.allocations(lambda: x + x) == [4000]
    assert not any(event.name == "aten::add" for event in profiled.events())


def test_hooks_on_the_gradient_of_a_leaf_are_seen():
    hooks = torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook
    for register in hooks:
        leaf = torch.nn.Parameter(torch.ones(2))
        assert not _private.has_gradient_hooks(leaf)
        handle = register(leaf, lambda _: None)
        assert _private.has_gradient_hooks(leaf)
        handle.remove()
        assert not _private.has_gradient_hooks(leaf)


def test_what_a_library_says_once_does_not_break_a_capture(monkeypatch):
    from torch._dynamo.exc import Unsupported

    from remat.torch._dynamo import once_left_unsaid

    def say_once(self, text):
        self.warning(text)

    monkeypatch.setattr(logging.Logger, "say_once", say_once, raising=False)
    log = logging.getLogger("a library")

    def double(x):
        log.say_once("doubled")
        return 2 * x

    captured = torch.compile(double, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported):
        captured(torch.ones(2))
    with once_left_unsaid():
        assert captured(torch.ones(2)).tolist() == [2, 2]


def test_the_engine_of_fully_shard_has_what_a_captured_step_calls():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    calls = {
        FSDPParamGroup: ("unshard", "wait_for_unshard", "_to_sharded", "post_backward", "use_training_state"),
        FSDPParam: ("init_all_gather_outputs", "init_unsharded_param", "free_unsharded_param", "_setattr_on_modules"),
        FSDPState: ("_lazy_init", "_root_pre_forward", "_register_root_post_backward_final_callback"),
    }
    missing = [
        f"{owner.__name__}.{name}" for owner, names in calls.items() for name in names if not hasattr(owner, name)
    ]
    assert not missing


def test_captured_functions_that_run_as_they_are_are_known():
    from remat.torch.graph_mode import _aot

    assert not _aot.runs_eagerly()
    with torch.compiler.set_stance("force_eager"):
        assert _aot.runs_eagerly()
    assert not _aot.runs_eagerly()
