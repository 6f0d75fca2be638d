"""Graph mode: large results written into tensors that nobody reads any more, with the same bits in the same bytes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from steps import QUICK
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import remat.torch
from remat.torch.graph_mode import reuse

pytestmark = pytest.mark.usefixtures("no_compiled_code")

aten = torch.ops.aten
SHAPE = (512, 640)  # A little over 1 MiB.


def operands(func, dtype):
    """Operands of which an operator makes something of ``SHAPE``."""
    rows, columns = SHAPE
    x, y = torch.randn(SHAPE, dtype=dtype), torch.randn(SHAPE, dtype=dtype)
    left, right = torch.randn(rows, 24, dtype=dtype), torch.randn(columns, 24, dtype=dtype).t()
    labels = torch.randint(0, columns, (rows,))
    labels[::7] = -100
    counted = torch.tensor(float((labels >= 0).sum()), dtype=dtype)
    return {
        aten._log_softmax.default: (x, 1, False),
        aten._log_softmax_backward_data.default: (x, torch.log_softmax(y, 1), 1, dtype),
        aten._softmax.default: (x, -1, False),
        aten._softmax_backward_data.default: (x, torch.softmax(y, 0), 0, dtype),
        aten.addmm.default: (torch.randn(columns, dtype=dtype), left, right),
        aten.bmm.default: (left[None], right[None]),
        aten.gelu.default: (x,),
        aten.gelu_backward.default: (x, y),
        aten.mm.default: (left, right),
        aten.nll_loss_backward.default: (counted.new_ones(()), x, labels, None, 1, -100, counted),
        aten.silu.default: (x,),
        aten.silu_backward.default: (x, y),
        **{getattr(aten, name).Tensor: (x, y[:1]) for name in ("add", "div", "mul", "sub")},
    }[func]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("func", sorted(reuse.INTO, key=str), ids=str)
def test_an_operator_writes_the_same_bits_over_whatever_was_there(func, dtype):
    torch.manual_seed(0)
    args = operands(func, dtype)
    expected = func(*args)
    into, keyword = reuse.INTO[func]
    there = torch.full_like(expected, float("nan"))
    found = into(*args, **{keyword: there})
    assert found.data_ptr() == there.data_ptr()
    assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8))  # 0 / 0 has bits to compare as well.
    assert not any(one.data_ptr() == expected.data_ptr() for one in args if isinstance(one, torch.Tensor))


class Wide(nn.Module):
    """Layers whose insides are large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, SHAPE[1]), nn.GELU(), nn.Linear(SHAPE[1], 32)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x.square().mean()


def stepped(loss_of, module, x):
    module.zero_grad()
    loss = loss_of(module, x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_a_step_has_the_same_bits_and_takes_no_more(monkeypatch, budget):
    module, x = Wide(), torch.randn(SHAPE[0], 32)
    expected = stepped(lambda model, batch: model(batch), module, x)
    peaks, plans = {}, {}
    for least_bytes in (2**40, reuse._LEAST_BYTES):
        monkeypatch.setattr(reuse, "_LEAST_BYTES", least_bytes)
        torch._dynamo.reset()
        planned = remat.torch.compile(lambda model, batch: model(batch), budget=budget, backend="aten", **QUICK)
        for one, other in zip(stepped(planned, module, x), expected, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(stepped(planned, module, x), expected, strict=True):
            assert torch.equal(one, other)
        module.zero_grad()
        plans[least_bytes] = planned.plan
        peaks[least_bytes] = remat.torch.measure(planned, module, x, repeats=1).peak_bytes
    without, with_ = plans.values()
    assert "out=" not in without.forward_source + without.backward_source
    assert "out=" in with_.forward_source + with_.backward_source
    assert with_.measured_peak_bytes == without.measured_peak_bytes == with_.peak_bytes
    assert len(set(peaks.values())) == 1


class Pass:
    """One pass, written by hand, that runs on real tensors."""

    def __init__(self):
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.x = self.placeholder("x", SHAPE[0], 24)
        self.w = self.placeholder("w", 24, SHAPE[1])

    def placeholder(self, name, *shape):
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, func, *args):
        node = self.graph.call_function(func, args)
        with self.mode:
            node.meta["val"] = func(*fx.map_arg(args, lambda one: one.meta["val"]))
        return node

    def reused(self, *results):
        self.graph.output(results)
        module, empty = fx.GraphModule({}, self.graph), fx.GraphModule({}, fx.Graph())
        empty.graph.output(())
        count = reuse.reuse_storage(module, empty)
        module.recompile()
        return count, module

    def test_inputs(self):
        torch.manual_seed(0)
        return torch.randn(SHAPE[0], 24), torch.randn(24, SHAPE[1])


def test_what_an_operator_may_hand_on_is_not_written_over():
    """A dropout in evaluation returns its argument, which lives on by another name."""
    one = Pass()
    made = one.call(aten.mm.default, one.x, one.w)
    dropped = one.call(aten.native_dropout.default, made, 0.5, False)
    kept = one.call(operator.getitem, dropped, 0)
    other = one.call(aten.mm.default, one.x, one.w)
    total = one.call(aten.sub.Tensor, kept, other)
    count, module = one.reused(total)
    assert count == 0
    assert not module(*one.test_inputs())[0].any()


@pytest.mark.parametrize("rows", [4, 4 * SHAPE[0]])
def test_a_tensor_waits_only_where_there_is_room(rows):
    """Between its last read and its next use lives something that is small, or as large as the pass' peak."""
    one = Pass()
    widest = one.call(aten.sum.default, one.call(aten.clone.default, one.placeholder("wide", 4 * SHAPE[0], SHAPE[1])))
    total = one.call(aten.sum.default, one.call(aten.mm.default, one.x, one.w))
    between = one.call(aten.sum.default, one.call(aten.clone.default, one.placeholder("other", rows, SHAPE[1])))
    again = one.call(aten.sum.default, one.call(aten.mm.default, one.x, one.w))
    count, _ = one.reused(widest, total, between, again)
    assert count == (1 if rows == 4 else 0)


def test_all_results_of_an_operator_are_there_while_it_runs():
    """Attention's backward kernel makes three gradients beside all that it reads: nothing else may wait then."""
    one = Pass()
    widest = one.call(aten.sum.default, one.call(aten.clone.default, one.placeholder("wide", 4 * SHAPE[0], SHAPE[1])))
    total = one.call(aten.sum.default, one.call(aten.mm.default, one.x, one.w))
    read = one.call(aten.clone.default, one.placeholder("other", 2 * SHAPE[0], SHAPE[1]))
    normed = one.call(aten.native_layer_norm.default, read, [SHAPE[1]], None, None, 1e-5)
    between = one.call(aten.sum.default, one.call(operator.getitem, normed, 0))
    again = one.call(aten.sum.default, one.call(aten.mm.default, one.x, one.w))
    count, _ = one.reused(widest, total, between, again)
    assert count == 0


def test_what_is_returned_or_still_seen_through_a_view_is_not_written_over():
    one = Pass()
    returned = one.call(aten.mm.default, one.x, one.w)
    seen = one.call(aten.mm.default, one.x, one.w)
    view = one.call(aten.view.default, seen, [-1])
    other = one.call(aten.mm.default, one.x, one.w)
    total = one.call(aten.sum.default, one.call(aten.mul.Tensor, other, other))
    count, _ = one.reused(returned, total, one.call(aten.sum.default, view))
    assert count == 0
