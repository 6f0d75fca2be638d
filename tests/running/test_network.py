"""Meshes, links, and what collectives take on them."""

from __future__ import annotations

import pytest

from remat.core.graph import Graph, Op, Tensor
from remat.running.network import Mesh, Network, UnknownMesh, axis_of, with_overlap


def test_a_mesh_is_read_as_it_is_written():
    mesh = Mesh.parse("data=64, fsdp=8,tensor=8")
    assert str(mesh) == "data=64,fsdp=8,tensor=8"
    assert (mesh.devices, mesh.replicas) == (4096, 512)
    assert [mesh.stride(axis) for axis in ("data", "fsdp", "tensor")] == [64, 8, 1]
    assert mesh.size("fsdp") == 8
    assert Mesh.parse("tensor=2").size("fsdp") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pipeline=2", "no axis 'pipeline'; the axes are data, fsdp, tensor"),
        ("fsdp", "the size '' of fsdp"),
        ("fsdp=0", "the size '0' of fsdp"),
        ("fsdp=2,fsdp=2", "fsdp is there twice"),
        ("tensor=2,fsdp=2", "in the order data, fsdp, tensor"),
    ],
)
def test_what_is_no_mesh_says_why(text, said):
    with pytest.raises(UnknownMesh, match=said):
        Mesh.parse(text)


def test_an_axis_inside_a_node_runs_over_its_links():
    network = Network.of(Mesh.parse("fsdp=8,tensor=8"), "h100")
    assert network.link("tensor").bytes_per_s == 450e9
    assert network.link("fsdp").bytes_per_s == 50e9  # One device of each node is in a ring.
    assert Network.of(Mesh.parse("fsdp=64"), "h100").link("fsdp").bytes_per_s == 8 * 50e9
    assert Network.of(Mesh.parse("fsdp=64"), "a100").link("fsdp").bytes_per_s == 8 * 25e9
    assert Network.of(Mesh.parse("fsdp=8,tensor=8"), "h100", "ethernet-100").link("fsdp").bytes_per_s == 12.5e9 / 8
    with pytest.raises(UnknownMesh, match="no network 'string'; choose one of infiniband-400"):
        Network.of(Mesh.parse("fsdp=2"), "h100", "string")


def test_a_ring_sends_what_the_literature_says():
    network = Network.of(Mesh.parse("tensor=4"), "h100")
    rate = 450e9 * 0.8
    gather = network.seconds("AllGather", "tensor", 1 << 30)
    assert gather == pytest.approx((1 << 30) * 3 / 4 / rate + 3 * 3e-6)
    assert network.seconds("ReduceScatter", "tensor", 1 << 30) == gather
    assert network.seconds("AllReduce", "tensor", 1 << 30) == pytest.approx(2 * gather)
    assert network.seconds("AllReduce", "data", 1 << 30) == 0  # An axis that the mesh does not have.


def step(*ops):
    tensors = tuple(Tensor(8) for _ in ops)
    made = (
        Op(name, name.partition(" ")[0], (), (number,), time_s, False, phase=phase)
        for number, (name, time_s, phase) in enumerate(ops)
    )
    return Graph(tuple(made), tensors)


def test_what_runs_beside_computation_takes_only_what_is_waited_for():
    graph = step(
        ("AllGather over fsdp", 1.0, "forward"),  # Nothing to run beside.
        ("mm", 3.0, "forward"),
        ("AllGather over fsdp", 2.0, "forward"),  # Begun with the mm.
        ("AllReduce over tensor", 0.5, "forward"),
        ("mm", 1.0, "backward"),
        ("AllGather over fsdp", 0.5, "backward"),  # Begun where it stands, and needed at once.
        ("ReduceScatter over fsdp", 1.0, "backward"),
        ("mm", 0.25, "backward"),
        ("adam", 0.5, "update"),  # Waits for the rest of the reduction.
    )
    found, traffic = with_overlap(graph)
    assert [op.time_s for op in found.ops] == [1.0, 3.0, 0.0, 0.5, 1.0, 0.5, 0.75, 0.25, 0.5]
    assert traffic.total_s == 5.0
    assert traffic.exposed_s == pytest.approx(1.0 + 0.5 + 0.5 + 0.75)
    assert traffic.by_axis_s == {"fsdp": 4.5, "tensor": 0.5}
    assert [axis_of(op) for op in graph.ops[:2]] == ["fsdp", ""]
