"""A step on a mesh that is only simulated: what each device holds, what is sent, and how blocks repeat."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_torch_processes import run
from torch import nn

import remat
import remat.torch
from remat.core.breakdown import breakdown
from remat.running.cost_model import get_profile
from remat.running.network import Mesh, Network, axis_of
from remat.torch.cluster.trace import MeshOptions, trace_on_mesh
from remat.torch.trace import gpu_scratch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("cluster_plan", ROOT / "examples" / "cluster_plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cluster_plan"] = module
    spec.loader.exec_module(module)
    return module


def options(mesh, **more):
    return MeshOptions(Network.of(Mesh.parse(mesh), "h100"), get_profile("h100"), "AdamW", **more)


def elements(example):
    return sum(p.numel() for p in example.Llama(2, 256, 512, 8, 2, 1024).parameters())


def traced(example, mesh, layers=2, samples=1, **more):
    return trace_on_mesh(lambda n: example.small_llama(n, layers=layers), samples, options(mesh, **more))


def sent(step):
    return Counter((op.phase, op.kind, axis_of(op)) for op in step.graph.ops if axis_of(op))


@pytest.mark.parametrize("mesh", ["fsdp=4", "data=2,fsdp=2,tensor=2"])
def test_each_device_has_its_share(example, mesh):
    step = traced(example, mesh)
    shards = Mesh.parse(mesh).size("fsdp") * Mesh.parse(mesh).size("tensor")
    found = breakdown(step.graph).size_bytes
    norms = 5 * 256 * 4  # Tensor parallelism leaves them whole.
    assert found["parameters"] == pytest.approx(4 * elements(example) / shards, abs=norms)
    assert found["optimizer_state"] == pytest.approx(2 * found["parameters"], abs=100)
    assert not dist.is_initialized()


def test_few_experts_are_not_padded_to_many_devices():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 64, 64))

        def forward(self, x):
            return torch.bmm(x, self.weight)

    def build(samples):
        with torch.device("meta"):
            experts, x = Experts(), torch.empty(2, samples, 64)
        return lambda x: experts(x).sum(), x

    step = trace_on_mesh(build, 1, options("fsdp=8"))
    assert breakdown(step.graph).size_bytes["parameters"] == 2 * 64 * 64 * 4 // 8


def test_what_is_sent_is_in_the_graph_and_runs_once(example):
    step = traced(example, "fsdp=2,tensor=2", samples=2)
    counts = sent(step)
    # Two blocks, the embedding, the head, and what is left.
    assert counts["backward", "ReduceScatter", "fsdp"] == 5
    assert counts["forward", "AllGather", "fsdp"] == 5
    # Two in each block and one for the embedding; backward, one for each input that several matrices read.
    assert counts["forward", "AllReduce", "tensor"] == 5
    assert counts["backward", "AllReduce", "tensor"] >= 4
    assert not any(op.recomputable for op in step.graph.ops if axis_of(op))
    assert step.traffic.by_axis_s.keys() == {"fsdp", "tensor"}
    assert 0 < step.traffic.exposed_s < step.traffic.total_s
    assert any("fsdp (2 devices) sends over NVLink 4 at 450 GB/s" in note for note in step.graph.notes)


def test_replicas_reduce_every_gradient_once(example):
    step = traced(example, "data=4")
    reduced = [op for op in step.graph.ops if axis_of(op) == "data"]
    assert len(reduced) == len(list(example.Llama(2, 256, 512, 8, 2, 1024).parameters()))
    assert {op.kind for op in reduced} == {"AllReduce"}
    assert breakdown(step.graph).size_bytes["inputs"] >= 4 * elements(example)  # The buckets.


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2", "data=2"])
def test_blocks_that_repeat_give_the_graph_of_all(example, mesh):
    few, every = (traced(example, mesh, layers=8, whole=whole) for whole in (False, True))
    assert few.traced_blocks == (3, 4, 5, 6)
    assert every.traced_blocks == (8,)
    assert few.graph.fingerprint == every.graph.fingerprint
    for one, other in zip(few.graph.ops, every.graph.ops, strict=True):
        assert (one.name, one.kind, one.phase, one.layer) == (other.name, other.kind, other.phase, other.layer)
        assert one.time_s == pytest.approx(other.time_s)


@pytest.mark.parametrize(
    ("mesh", "more", "said"),
    [
        ("fsdp=2,tensor=3", {}, r"weight of 1024 x 256 is cut rowwise_embedding, and 1024 does not divide by tensor=3"),
        ("tensor=2", {"styles": {"*.query": "colwise"}}, r"no layer of this model has a name.*layers\.\*\.mlp"),
        ("tensor=2", {"styles": {"*.q_proj": "diagonal"}}, r"no style 'diagonal'; the styles are colwise"),
        ("data=2", {"mixed_precision": "bfloat16"}, r"data=2 has no axis fsdp"),
        ("fsdp=2", {"mixed_precision": "int8"}, r"'int8': this is no floating-point dtype"),
    ],
)
def test_what_cannot_be_distributed_says_so_in_a_line(example, mesh, more, said):
    with pytest.raises(remat.UnsupportedStep, match=said):
        traced(example, mesh, **more)
    assert not dist.is_initialized()


def test_a_batch_and_a_model_that_do_not_suit(example):
    with pytest.raises(remat.UnsupportedStep, match=r"5 samples does not divide by data x fsdp = 4.*such as 4"):
        remat.torch.plan_mesh(example.small_llama, "fsdp=4", device="h100", batch_size=5)
    with pytest.raises(remat.UnsupportedStep, match="memory of the device 'cpu' is not known"):
        remat.torch.plan_mesh(example.small_llama, "fsdp=4", device="cpu")
    layer = nn.Linear(4, 4)
    with pytest.raises(remat.UnsupportedStep, match="weight has memory"):
        remat.torch.plan_mesh(lambda n: (lambda x: layer(x).sum(), torch.ones(n, 4)), "fsdp=4", device="h100")


@pytest.mark.thorough
def test_a_plan_says_what_fits(example):
    def build(samples):
        return example.small_llama(samples, layers=8)

    given = {"device": "h100", "mixed_precision": "bfloat16", "planner": "peak_greedy", "time_limit_s": 5}
    roomy = remat.torch.plan_mesh(build, "fsdp=4", **given)
    assert roomy.plan.recomputed == 0
    assert not roomy.reshard_after_forward
    # What cuBLAS keeps is most of so small a step.
    kept_bytes = gpu_scratch.cublas_bytes([torch.ops.aten.mm.default], (9, 0))
    budget = kept_bytes + int(0.8 * (roomy.plan.peak_bytes - kept_bytes))
    tight = remat.torch.plan_mesh(build, "fsdp=4", budget=budget, max_batch=True, batch_size=8, **given)
    assert tight.reshard_after_forward
    assert tight.plan.peak_bytes <= budget
    assert tight.max_batch.plain.batch_size <= tight.max_batch.planned.batch_size
    assert tight.max_batch.planned.peak_bytes <= budget
    assert "It fits with reshard_after_forward" in str(tight)
    assert json.loads(json.dumps(tight.to_json()))["max_batch"]["planned"]["batch_size"] % 4 == 0
    none = remat.torch.plan_mesh(build, "fsdp=4", budget="1MiB", **given)
    assert none.plan is None
    assert "It does not fit: no schedule within 1048576 bytes" in str(none)


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["mesh_fsdp", "mesh_tensor"])
def test_the_predicted_memory_is_that_of_two_processes(scenario, tmp_path):
    for found in run(scenario, tmp_path):
        assert found["measured"] == pytest.approx(found["predicted"], rel=0.03)
