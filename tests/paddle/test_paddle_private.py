"""The private symbols of Paddle that remat reaches for: a release that moves one fails here, by name."""

from __future__ import annotations

import paddle
import pytest
from paddle.base import core
from paddle.base.libpaddle import pir

from remat.paddle import _private


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            pir,
            ("IrMapping", "CloneOptions", "set_insertion_point", "get_current_insertion_point", "get_op_inplace_info"),
        ),
        (core, ("host_memory_stat_current_value", "host_memory_stat_peak_value", "host_memory_stat_reset_peak_value")),
        (
            core.eager,
            ("register_saved_tensors_hooks", "reset_saved_tensors_hooks", "run_backward", "run_partial_grad"),
        ),
        (paddle._C_ops, ("assign", "dropout_grad", "batch_norm", "_run_python_op")),
        (_private.executor_module._ExecutorCache, ("_CachedData", "get_pir_program_and_executor")),
        (_private.PartialProgramLayerHook, ("before_append_backward", "after_append_backward", "after_infer")),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_it_is_there(owner, names):
    assert [name for name in names if not hasattr(owner, name)] == []


def test_the_flags_are_there():
    names = (_private.IN_ORDER, _private.ONE_THREAD, _private.MERGES_COPIES)
    assert set(_private.flags(*names)) == set(names)


def test_the_counter_counts():
    before = _private.allocated_bytes()
    _private.reset_peak()
    held = paddle.zeros([1 << 16])
    assert _private.allocated_bytes() - before >= 4 << 16
    del held
    assert _private.peak_bytes() - before >= 4 << 16


def test_a_gradient_outlives_that_of_its_parameter():
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    (x * x).sum().backward()
    kept = _private.gradient_of(x)
    x.grad = None
    assert kept.tolist() == [2.0, 4.0]
    assert _private.gradient_of(x) is None


def test_the_hooks_of_an_outer_call_are_in_force_after_an_inner_one():
    seen = []
    x = paddle.ones([2])
    x.stop_gradient = False
    with _private.saved_tensors_hooks(lambda t: seen.append("outer") or t, lambda t: t):
        with _private.saved_tensors_hooks(lambda t: seen.append("inner") or t, lambda t: t):
            paddle.tanh(x)
        paddle.tanh(x)
    assert not _private.has_hooks()
    assert seen == ["inner", "outer"]


def test_whether_a_graph_is_kept_is_known_in_every_backward_pass():
    _private.watch_backward_passes()
    seen = []
    x = paddle.ones([2])
    x.stop_gradient = False
    for keeps in (True, False):
        for start in (
            lambda y, keeps: y.backward(retain_graph=keeps),
            lambda y, keeps: paddle.autograd.backward([y], retain_graph=keeps),
            lambda y, keeps: paddle.grad([y], [x], retain_graph=keeps),
        ):
            y = x * 2.0
            y.register_hook(lambda _: seen.append(_private.graph_is_kept()))
            start(y.sum(), keeps)
    assert seen == [True] * 3 + [False] * 3
    assert _private.graph_is_kept()
