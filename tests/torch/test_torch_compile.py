"""torch.compile within a budget: how a joint graph is parted, what its kernels need, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from steps import QUICK
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch_models import gpt2, mlp

import remat
import remat.torch
from remat.cost_model import get_profile
from remat.plan import plan_for_schedule
from remat.torch.kernel_memory import Buffer, peak_of_kernels


class Mixed(nn.Module):
    """Views, a skip connection, BatchNorm, random draws, an operator with several results, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x).view(-1, 4, 8).transpose(0, 1)
            largest, _ = y.max(2, keepdim=True)
            x = x + F.dropout((y - largest).transpose(0, 1).reshape(x.shape), 0.2)
        x = torch.tanh(x)
        return F.linear(self.gates[0](x) * self.gates[1](x), self.layers[0][0].weight)


def gradients(module, loss, x, seed=3):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    module.zero_grad()
    torch.manual_seed(seed)
    loss(x).backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def read_then_made_again(graph):
    """A schedule in which the backward pass reads what was saved, drops it, and makes it again for a later read."""
    plain = list(graph.plain_schedule)
    for index, op in enumerate(graph.ops):
        readers = [r for t in op.outputs for r in graph.readers[t] if graph.ops[r].phase == "backward"]
        if op.recomputable and op.phase == "forward" and len(set(readers)) > 1:
            return (*plain[: max(readers)], index, *plain[max(readers) :])
    raise AssertionError("the model has no such tensor")


def parted_backend(budget_share, seen):
    """Runs both parts operator by operator, with no code generated: PyTorch's own random numbers, and no fusion."""
    from remat.torch import _inductor, joint_graph, partition

    def part(joint, joint_inputs, *, num_fwd_outputs, static_lifetime_input_indices, **kwargs):
        joint = _inductor.simplified(joint)
        step = joint_graph.joint_step(joint, num_fwd_outputs, get_profile("cpu"), static_lifetime_input_indices)
        try:
            if budget_share == "read, then made again":
                plan = plan_for_schedule(step.graph, read_then_made_again(step.graph), planner="by hand")
            else:
                plan = remat.plan(step.graph, budget_share, **QUICK)
        except remat.InfeasibleBudget as error:
            plan = remat.plan(step.graph, error.minimum_bytes, **QUICK)
        seen.append((step, plan, partition.parted(joint, step, plan.schedule, num_fwd_outputs)))
        return seen[-1][2]

    return aot_autograd(fw_compiler=lambda module, inputs: make_boxed_func(module), partition_fn=part)


@pytest.mark.parametrize("budget", ["1%", "read, then made again"])
def test_a_joint_graph_in_parts_is_exact(budget):
    module = Mixed()
    x = torch.randn(64, 32)
    loss = lambda x: module(x).square().mean()  # noqa: E731
    before = {name: value.clone() for name, value in module.state_dict().items()}
    plain = gradients(module, loss, x)
    module.load_state_dict(before)
    seen = []
    torch._dynamo.reset()
    planned = gradients(module, torch.compile(loss, backend=parted_backend(budget, seen), fullgraph=True), x)
    ((step, plan, (_, backward)),) = seen
    assert plan.recomputed > 0
    assert planned.keys() == plain.keys()
    assert all(torch.equal(planned[name], plain[name]) for name in plain)

    # What runs in the backward pass is what the schedule says, no more.
    after = plan.schedule[plan.schedule.index(step.first_backward) :]
    wanted = [node.target for op in after for node in step.groups[op] if node.target is torch.ops.aten.addmm.default]
    ran = [node for node in backward.graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert len(ran) == len(wanted)

    # With no code generated dropout draws from the generator itself, and what BatchNorm's statistics become is written.
    once = {op.kind for op in step.graph.ops if not op.recomputable and op.phase == "forward"}
    assert any("bernoulli" in kind or "rand" in kind or "dropout" in kind for kind in once)
    layers, roles = {op.layer for op in step.graph.ops}, {step.graph.tensors[n].role for n in step.graph.inputs}
    assert any("layers.2" in layer for layer in layers)
    assert roles == {"parameter", "state", "batch"}


def test_memory_of_kernels():
    first = Buffer("a", 100, 100, 0, 1, True, "f")
    # Written over "a" at its last read: the two are never there together.
    over = Buffer("b", 100, 100, 1, 2, True, "f", takes_over="a")
    assert peak_of_kernels([first, over], 3) == 100
    apart = Buffer("b", 100, 100, 1, 2, True, "f")
    assert peak_of_kernels([first, apart], 3) == 200
    # Freed after kernel 1, handed on in kernel 3: it is there in between.
    later = Buffer("c", 100, 100, 3, None, True, "f")
    large = Buffer("d", 70, 70, 2, 2, True, "g")
    base = Buffer("e", 150, 150, 1, 1, False, "")
    assert peak_of_kernels([first, base, large, later], 4) == 250
    assert peak_of_kernels([first, large, later], 4) == 100
    # A value inside of a fused kernel takes none.
    assert peak_of_kernels([first, Buffer("b", 100, 100, 0, 0, True, "f", is_stored=False)], 2) == 100


def test_a_budget_is_read_at_once():
    with pytest.raises(remat.InvalidBudget):
        remat.torch.compile(lambda x: x, budget="many")


@pytest.mark.slow
def test_a_compiled_step_keeps_its_budget_with_the_same_numbers():
    case = mlp(layers=10, width=128, batch=512, dropout=0.1)
    plain = torch.compile(case.loss, fullgraph=True, dynamic=False)
    planned = remat.torch.compile(case.loss, budget="60%", **QUICK)
    expected = gradients(case.module, plain, *case.args)
    found = gradients(case.module, planned, *case.args)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert planned.plan.recomputed > 0
    plain_peak = remat.torch.measure(plain, *case.args, repeats=1).peak_bytes
    peak = remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
    assert planned.plan.compiled_peak_bytes == pytest.approx(plain_peak, rel=0.02)
    assert peak == pytest.approx(planned.plan.peak_bytes, rel=0.05)
    assert peak <= planned.plan.budget_bytes <= 0.61 * plain_peak


@pytest.mark.slow
def test_a_compiled_step_that_cannot_fit_names_the_smallest_budget():
    case = mlp(layers=6, width=64)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.torch.compile(case.loss, budget=1000, **QUICK)(*case.args)
    planned = remat.torch.compile(case.loss, budget=caught.value.minimum_bytes, **QUICK)
    planned(*case.args).backward()
    assert planned.plan.peak_bytes <= caught.value.minimum_bytes
    assert remat.torch.measure(planned, *case.args, repeats=1).peak_bytes <= caught.value.minimum_bytes


@pytest.mark.slow
def test_gpt2_compiled_within_a_budget():
    case = gpt2(layers=2)
    plain = torch.compile(case.loss, fullgraph=True, dynamic=False)
    planned = remat.torch.compile(case.loss, budget="60%", time_limit_s=5)
    expected = gradients(case.module, plain, *case.args)
    found = gradients(case.module, planned, *case.args)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    peak = remat.torch.measure(planned, *case.args, repeats=1).peak_bytes
    assert peak <= planned.plan.budget_bytes
    assert peak == pytest.approx(planned.plan.peak_bytes, rel=0.05)
