"""Many devices: a mesh of them, the links between them, and what a collective takes on these.

A collective's time is that of NCCL's ring: with ``n`` ranks, an all-gather and a reduce-scatter of ``S`` bytes send
``S (n - 1) / n`` bytes over each link, an all-reduce twice as many; each of the ``n - 1`` steps waits for a latency.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from remat.core.graph import Graph, Op

AXES: Final[dict[str, str]] = {
    "data": "every rank has all parameters; gradients are reduced",
    "fsdp": "parameters, gradients and the optimizer's state are sharded, and parameters gathered block by block",
    "tensor": "matrices are cut, and their products reduced",
}
"""The axes of a mesh, and what is done along them."""

_ROUNDS: Final = {"AllGather": 1, "ReduceScatter": 1, "AllReduce": 2, "AllToAll": 1, "Broadcast": 1}
"""How many times a ring sends the whole of what a collective is about."""

_EFFICIENCY: Final = 0.8
"""The part of a link's bandwidth that NCCL reaches with large messages. A judgement, not measured. A smaller
part makes collectives dearer in proportion; plans recompute less beside what is waited for anyway."""

_OVERLAPPING: Final = ("data", "fsdp")
"""The axes whose collectives run beside computation, on a stream of their own."""


class UnknownMesh(ValueError):
    """A mesh, or a network, that cannot be read or is not known."""


@dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        name: for people.
        bytes_per_s: of one device, in one direction, as its vendor states it.
        latency_s: of one message.
    """

    name: str
    bytes_per_s: float
    latency_s: float


# Inside of a node, by device. NVIDIA's datasheets state both directions together: H100 and H200 SXM 900 GB/s, A100 SXM
# 600 GB/s. Latencies are estimates.
_INSIDE: Final = {
    "a100": Link("NVLink 3", 300e9, 3e-6),
    "h100": Link("NVLink 4", 450e9, 3e-6),
    "h200": Link("NVLink 4", 450e9, 3e-6),
}
_IN_NODE: Final = 8  # NVIDIA's DGX and HGX boards hold eight of these.

# Between nodes, for each device. NVIDIA DGX H100: eight ConnectX-7 of 400 Gb/s for eight GPUs; DGX A100: eight
# ConnectX-6 of 200 Gb/s. AWS p5: 3,200 Gb/s, and p4d: 400 Gb/s for eight GPUs. Ethernet: one
# port of 100 Gb/s for eight.
_BETWEEN: Final = {
    one.name: one
    for one in (
        Link("infiniband-400", 50e9, 10e-6),
        Link("infiniband-200", 25e9, 10e-6),
        Link("efa-3200", 50e9, 20e-6),
        Link("efa-400", 6.25e9, 20e-6),
        Link("ethernet-100", 1.5625e9, 30e-6),
    )
}
_USUAL: Final = {"a100": "infiniband-200"}


def network_names() -> tuple[str, ...]:
    """The names that a network between nodes may have."""
    return tuple(_BETWEEN)


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid; as in PyTorch's ``init_device_mesh``, neighbours along the last axis have neighbouring ranks.

    Attributes:
        axes: name and size of each, the outermost first; those of ``AXES``, each at most once.
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that a text such as ``data=64,fsdp=8,tensor=8`` describes.

        Raises:
            UnknownMesh: if it describes none; the message says what is wrong.
        """
        example = "write axes and their sizes, such as fsdp=8,tensor=8"
        axes: list[tuple[str, int]] = []
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if name not in AXES:
                raise UnknownMesh(
                    f"mesh {text!r}: there is no axis {name!r}; the axes are {', '.join(AXES)}; {example}"
                )
            if not size.isascii() or not size.isdigit() or int(size) < 1:
                raise UnknownMesh(f"mesh {text!r}: the size {size!r} of {name} is no number above 0; {example}")
            if name in dict(axes):
                raise UnknownMesh(f"mesh {text!r}: the axis {name} is there twice; {example}")
            axes.append((name, int(size)))
        order = list(AXES)
        if [name for name, _ in axes] != sorted(dict(axes), key=order.index):
            raise UnknownMesh(
                f"mesh {text!r}: the axes stand in the order {', '.join(AXES)}, since neighbours along the last "
                "one are closest to each other"
            )
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def size(self, axis: str) -> int:
        """How many devices an axis has; 1 where the mesh does not have it."""
        return dict(self.axes).get(axis, 1)

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(size for _, size in self.axes)

    @property
    def replicas(self) -> int:
        """How many parts a batch is cut into."""
        return self.size("data") * self.size("fsdp")

    @property
    def is_replicated(self) -> bool:
        """Does every device have all parameters of its part of the model, and reduce gradients with others?"""
        return self.size("data") > 1 and self.size("fsdp") == 1

    def stride(self, axis: str) -> int:
        """How far apart the ranks of neighbours along an axis are."""
        names = [name for name, _ in self.axes]
        return math.prod(size for _, size in self.axes[names.index(axis) + 1 :])


@dataclass(frozen=True)
class Network:
    """A mesh, and the links that its collectives use.

    Attributes:
        mesh: of devices.
        inside: the link between devices of one node.
        between: the link of each device to other nodes.
        node: how many devices a node has.
    """

    mesh: Mesh
    inside: Link
    between: Link
    node: int

    @classmethod
    def of(cls, mesh: Mesh, device: str, between: str | None = None, node: int | None = None) -> Network:
        """The network of a cluster of devices.

        Args:
            mesh: of devices.
            device: name of a device profile.
            between: a name of ``network_names()``; None means what the vendor builds around the device.
            node: how many devices a node has; None means 8 for GPUs, and 1 for any other device.

        Raises:
            UnknownMesh: for an unknown network.
        """
        name = between or _USUAL.get(device.lower(), "infiniband-400")
        if name not in _BETWEEN:
            raise UnknownMesh(f"there is no network {name!r}; choose one of {', '.join(_BETWEEN)}")
        inside = _INSIDE.get(device.lower())
        in_node = node or (1 if inside is None else _IN_NODE)
        return cls(mesh, inside or _BETWEEN[name], _BETWEEN[name], in_node)

    def link(self, axis: str) -> Link:
        """What a ring along an axis runs over, the slowest part of it.

        Where several devices of a node are in one ring, each sends over a link of its own to the next node, and they
        share the work: NCCL makes one ring for each.
        """
        stride, size = self.mesh.stride(axis), self.mesh.size(axis)
        if stride * size <= self.node:
            return self.inside
        in_one_node = max(1, self.node // stride)
        rate = min(self.inside.bytes_per_s, in_one_node * self.between.bytes_per_s) if in_one_node > 1 else None
        return self.between if rate is None else replace(self.between, bytes_per_s=rate)

    def seconds(self, kind: str, axis: str, size_bytes: int) -> float:
        """What a collective takes.

        Args:
            kind: as NCCL names it.
            axis: along which it sends.
            size_bytes: of what every rank has afterwards (AllGather), or had before (ReduceScatter, AllReduce).
        """
        ranks = self.mesh.size(axis)
        if ranks == 1:
            return 0.0
        link = self.link(axis)
        rounds = _ROUNDS[kind]
        sent = rounds * size_bytes * (ranks - 1) / ranks
        return sent / (link.bytes_per_s * _EFFICIENCY) + rounds * (ranks - 1) * link.latency_s

    def notes(self) -> tuple[str, ...]:
        """What is assumed of the network, a sentence each."""
        found = []
        for axis, size in self.mesh.axes:
            if size > 1:
                link = self.link(axis)
                found.append(
                    f"{axis} ({size} devices) sends over {link.name} at {link.bytes_per_s / 1e9:g} GB/s a device"
                )
        return (
            (f"{'; '.join(found)}; a node has {self.node} devices, and a ring reaches {_EFFICIENCY:.0%} of a link",)
            if found
            else ()
        )


@dataclass(frozen=True)
class Traffic:
    """What the collectives of a step take.

    Attributes:
        total_s: all of them.
        exposed_s: the part of it for which computation waits.
        by_axis_s: all of them, by axis.
    """

    total_s: float
    exposed_s: float
    by_axis_s: dict[str, float]


def axis_of(op: Op) -> str:
    """The axis along which a collective sends; "" for any other op."""
    return op.name.rpartition(" over ")[2] if op.kind in _ROUNDS and " over " in op.name else ""


def with_overlap(graph: Graph) -> tuple[Graph, Traffic]:
    """The same step, where a collective takes only as long as computation waits for it.

    Computation and the collectives of ``data`` and ``fsdp`` run side by side, these one after another. A gather of the
    forward pass begins when computation reaches the gather before it, since the CPU runs ahead by one block; one of the
    backward pass begins where it stands, since ``fully_shard`` itself prefetches there. Computation waits for its end
    where what it gathered is read. A reduction begins where it stands, and only the update waits for it. Nothing runs
    beside a collective of ``tensor``: computation needs its result at once.

    Args:
        graph: with collectives that take as long as they send.
    """
    clock = _Clock([op.time_s for op in graph.ops])
    awaited: dict[int, list[int]] = {}
    total, by_axis = 0.0, dict[str, float]()
    for index, op in enumerate(graph.ops):
        axis = axis_of(op)
        if op.phase == "update":
            clock.wait_for_reductions()
        for gather in awaited.pop(index, ()):
            clock.wait_for_gather(gather)
        if axis:
            total += op.time_s
            by_axis[axis] = by_axis.get(axis, 0.0) + op.time_s
        if axis not in _OVERLAPPING:
            clock.compute(op.time_s, sends=bool(axis))
        elif op.kind == "AllGather":
            clock.gather(index, op.time_s, early=op.phase == "forward")
            read_by = [reader for t in op.outputs for reader in graph.readers[t] if reader > index]
            if read_by:
                awaited.setdefault(min(read_by), []).append(index)
            else:
                clock.wait_for_gather(index)
        else:
            clock.reduce(index, op.time_s)
    clock.wait_for_reductions()
    ops = tuple(
        op if op.time_s == time_s else replace(op, time_s=time_s)
        for op, time_s in zip(graph.ops, clock.times_s, strict=True)
    )
    return replace(graph, ops=ops), Traffic(total, clock.exposed_s, by_axis)


class _Clock:
    """Two clocks, of computation and of the network.

    Attributes:
        times_s: of each op, what computation spends on it or waits for it.
        exposed_s: what computation has waited for collectives.
    """

    def __init__(self, times_s: list[float]) -> None:
        self.times_s = times_s
        self.exposed_s = 0.0
        self._computed = self._sent = self._last_gather = 0.0
        self._ends: dict[int, float] = {}
        self._last_reduction: int | None = None

    def compute(self, time_s: float, *, sends: bool) -> None:
        """Nothing runs beside what sends here."""
        self._computed += time_s
        self.exposed_s += time_s if sends else 0.0

    def gather(self, op: int, time_s: float, *, early: bool) -> None:
        """A gather begins; early, where the one before it did."""
        begins = self._last_gather if early else self._computed
        self._ends[op] = self._sent = max(self._sent, begins) + time_s
        self._last_gather, self.times_s[op] = self._computed, 0.0

    def wait_for_gather(self, op: int) -> None:
        """Computation needs what was gathered."""
        self._wait(op, self._ends[op])
        self._last_gather = self._computed

    def reduce(self, op: int, time_s: float) -> None:
        """A reduction begins."""
        self._sent = max(self._sent, self._computed) + time_s
        self.times_s[op], self._last_reduction = 0.0, op

    def wait_for_reductions(self) -> None:
        """Computation needs the reduced gradients."""
        if self._last_reduction is not None:
            self._wait(self._last_reduction, self._sent)
            self._last_reduction = None

    def _wait(self, op: int, until: float) -> None:
        waited = max(0.0, until - self._computed)
        self.times_s[op] += waited
        self._computed += waited
        self.exposed_s += waited
