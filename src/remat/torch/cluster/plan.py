"""``plan_mesh``: a step, a mesh and a device to what each device needs, and how it fits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from remat.core.budget import format_bytes, parse_budget
from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.auto_budget import auto_budget_bytes
from remat.planning.batch_size import LargestBatch, LargestBatches, largest_batches
from remat.planning.find import find
from remat.running.cost_model import get_profile
from remat.running.network import Mesh, Network
from remat.torch.cluster.trace import Build, MeshOptions, MeshTrace, trace_on_mesh

_SECONDS: Final = 25.0
"""Wall seconds for each plan where the caller gives none. A judgement: a decoder of 80 layers has 12,000 ops, and the
whole question is to be answered within minutes. Shorter, and plans are dearer."""


_SEVERAL: Final = 2  # The fewest samples of a batch that is no single one.


@dataclass(frozen=True)
class MeshPlan:
    """What each device of a mesh needs for a step.

    Attributes:
        mesh: as written.
        device: name of its profile.
        step: the traced step of one device.
        samples: in the whole batch.
        plan: the schedule for the budget; None where no schedule fits.
        refused: why there is none; "" where there is one.
        budget_bytes: of each device.
        reshard_after_forward: were parameters let go of after a block's forward pass, and gathered again?
        max_batch: the largest batches, in samples of one device; None if they were not asked for.
        seconds: that tracing and planning took.
    """

    mesh: Mesh
    device: str
    step: MeshTrace
    samples: int
    plan: Plan | None
    refused: str
    budget_bytes: int
    reshard_after_forward: bool
    max_batch: LargestBatches | None
    seconds: float

    @property
    def graph(self) -> Graph:
        """The step of one device."""
        return self.step.graph

    def lines(self) -> list[str]:
        """The answer in sentences."""
        graph, traffic = self.graph, self.step.traffic
        per_device = self.samples // self.mesh.replicas
        plain = simulate(graph, graph.plain_schedule)
        found = [
            f"{self.step.parameters / 1e9:.3g} billion parameters on {self.mesh.devices} devices ({self.mesh}), "
            f"{self.samples} samples, {per_device} a device",
            f"Each device: {format_bytes(graph.pinned_bytes)} resident, {format_bytes(plain.peak_bytes)} at the plain "
            f"step's peak, budget {format_bytes(self.budget_bytes)}",
        ]
        if self.plan is None:
            found.append(f"It does not fit: {self.refused}")
        else:
            levers = ["reshard_after_forward"] if self.reshard_after_forward and self.mesh.size("fsdp") > 1 else []
            levers += [f"recomputation (+{self.plan.overhead:.2%})"] if self.plan.recomputed else []
            found.append(
                f"It fits with {' and '.join(levers) or 'no lever'}: {format_bytes(self.plan.peak_bytes)}, predicted "
                f"{self.plan.time_s:.3g} s a step"
            )
        by_axis = ", ".join(f"{axis} {seconds:.3g} s" for axis, seconds in traffic.by_axis_s.items())
        found.append(
            f"Collectives: {traffic.total_s:.3g} s a step ({by_axis or 'none'}), of which computation waits for "
            f"{traffic.exposed_s:.3g} s"
        )
        if self.max_batch is not None:
            for what, one in (("plain", self.max_batch.plain), ("planned", self.max_batch.planned)):
                found.append(
                    f"Largest batch, {what}: {one.batch_size * self.mesh.replicas} samples, {one.batch_size} a device "
                    f"({format_bytes(one.peak_bytes)}, +{one.overhead:.2%})"
                )
        found += [f"Assumed: {note}" for note in graph.notes]
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """The same as numbers; the plan's schedule is left out."""
        graph, plan, traffic = self.graph, self.plan, self.step.traffic
        replicas = self.mesh.replicas
        return {
            "mesh": dict(self.mesh.axes),
            "devices": self.mesh.devices,
            "device": self.device,
            "parameters": self.step.parameters,
            "blocks": self.step.blocks,
            "traced_blocks": list(self.step.traced_blocks),
            "ops": len(graph.ops),
            "batch_size": self.samples,
            "samples_per_device": self.samples // replicas,
            "resident_bytes": graph.pinned_bytes,
            "baseline_peak_bytes": simulate(graph, graph.plain_schedule).peak_bytes,
            "baseline_time_s": graph.time_s,
            "budget_bytes": self.budget_bytes,
            "fits": plan is not None,
            "refused": self.refused,
            "peak_bytes": None if plan is None else plan.peak_bytes,
            "time_s": None if plan is None else plan.time_s,
            "overhead": None if plan is None else plan.overhead,
            "recomputed": None if plan is None else plan.recomputed,
            "reshard_after_forward": self.reshard_after_forward,
            "collectives": dataclasses.asdict(traffic),
            "max_batch": None
            if self.max_batch is None
            else {
                name: {**dataclasses.asdict(one), "batch_size": one.batch_size * replicas, "per_device": one.batch_size}
                for name, one in (("plain", self.max_batch.plain), ("planned", self.max_batch.planned))
            },
            "assumed": list(graph.notes),
            "plan_seconds": self.seconds,
        }


def plan_mesh(
    build: Build,
    mesh: str | Mesh,
    *,
    device: str,
    batch_size: int | None = None,
    budget: int | str | None = None,
    optimizer: str | None = "AdamW",
    mixed_precision: str | None = None,
    styles: Mapping[str, str] | None = None,
    reshard_after_forward: bool | None = None,
    network: str | None = None,
    devices_per_node: int | None = None,
    max_batch: bool = False,
    planner: str = "auto",
    time_limit_s: float | None = _SECONDS,
) -> MeshPlan:
    """Plan a training step on many devices, none of which is here.

    The model is distributed by PyTorch's own ``parallelize_module`` and ``fully_shard`` over processes that are only
    simulated, and the step of the first one is traced. Nothing is sent, and no weight is made.

    Args:
        build: given a number of samples, returns a loss function and its arguments, as ``remat.torch.plan`` takes them;
            the model, which the function refers to or is given, is on the meta device. It is called several times.
        mesh: axes and sizes, the outermost first, such as "data=2,fsdp=8,tensor=8". Along ``data`` gradients are
            reduced; along ``fsdp`` parameters, gradients and the optimizer's state are sharded; along ``tensor``
            matrices are cut. The batch is cut over ``data`` and ``fsdp``.
        device: profile of each device: "a100", "h100" or "h200".
        batch_size: samples of the whole mesh; None means one for each part of the batch.
        budget: of each device, as in ``remat.torch.plan``; None means its memory less a margin.
        optimizer: name of a class of ``torch.optim``; None leaves the update out.
        mixed_precision: the dtype that parameters are gathered in, "bfloat16"; gradients are then reduced in float32.
            None computes in the parameters' own dtype.
        styles: for tensor parallelism: the style of each layer by a pattern of its name, of
            ``remat.torch.cluster.shard.STYLES``. None means ``DEFAULT_STYLES`` there.
        reshard_after_forward: as ``fully_shard`` takes it; None tries False, and True where that does not fit.
        network: between nodes, a name of ``remat.running.network.network_names()``; None means what the vendor of the
            device builds.
        devices_per_node: None means 8 for GPUs.
        max_batch: also look for the largest batch.
        planner: a planner's name.
        time_limit_s: wall seconds for each plan.

    Raises:
        UnknownMesh: for a mesh or a network that cannot be read.
        UnsupportedStep: where sizes do not divide, the step cannot be traced, or the device's memory is not known.
    """
    started = time.perf_counter()
    grid = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    profile = get_profile(device)
    samples = grid.replicas if batch_size is None else batch_size
    if samples % grid.replicas:
        raise UnsupportedStep(
            f"a batch of {samples} samples does not divide by data x fsdp = {grid.replicas} of the mesh {grid}; "
            f"such as {max(1, round(samples / grid.replicas)) * grid.replicas}"
        )
    if budget is None and profile.memory_bytes is None:
        raise UnsupportedStep(f"the memory of the device {device!r} is not known: give budget=")
    options = MeshOptions(
        Network.of(grid, device, network, devices_per_node),
        profile,
        optimizer,
        None if styles is None else dict(styles),
        mixed_precision,
        reshard_after_forward,
    )
    asked = auto_budget_bytes(device, profile.memory_bytes) if budget is None else budget
    choices = (False, True) if reshard_after_forward is None and grid.size("fsdp") > 1 else (reshard_after_forward,)
    per_device = samples // grid.replicas
    plan, refused = None, ""
    for choice in choices:
        options = dataclasses.replace(options, reshard_after_forward=choice)
        step = trace_on_mesh(build, per_device, options)
        plain_bytes = simulate(step.graph, step.graph.plain_schedule).peak_bytes
        budget_bytes = parse_budget(asked, plain_bytes)
        if plain_bytes > budget_bytes and choice is False and reshard_after_forward is None:
            continue  # Gathering again is cheaper than computing again: it runs beside computation.
        try:
            plan = find(step.graph, budget_bytes, planner, time_limit_s)
        except InfeasibleBudget as error:
            refused = str(error)
        break
    batches = None
    if max_batch:
        batches = _batches(build, options, per_device, step.graph, plan, budget_bytes, planner, time_limit_s)
    return MeshPlan(
        grid,
        device,
        step,
        samples,
        plan,
        refused,
        budget_bytes,
        bool(options.reshard_after_forward),
        batches,
        time.perf_counter() - started,
    )


def _batches(
    build: Build,
    options: MeshOptions,
    per_device: int,
    graph: Graph,
    plan: Plan | None,
    budget_bytes: int,
    planner: str,
    time_limit_s: float | None,
) -> LargestBatches:
    """The largest batches of one device.

    Batches of a single sample run other operations (a transposed tensor of one sample may be contiguous), so that they
    are looked at by themselves.
    """
    known = {per_device: graph}

    def traced(count: int) -> Graph:
        if count not in known:
            known[count] = trace_on_mesh(build, count, options).graph
        return known[count]

    found = largest_batches(
        traced,
        budget_bytes,
        batch_size=max(_SEVERAL, per_device),
        smallest=_SEVERAL,
        planner=planner,
        time_limit_s=time_limit_s,
    )
    plain, planned = found.plain, found.planned
    if not (plain.batch_size and planned.batch_size):
        single = traced(1)
        peak_bytes = simulate(single, single.plain_schedule).peak_bytes
        one = LargestBatch(1, peak_bytes, 0.0) if peak_bytes <= budget_bytes else None
        plain = plain if plain.batch_size else one or LargestBatch(0, peak_bytes, 0.0)
        if per_device != 1 and one is None:
            try:
                plan = find(single, budget_bytes, planner, time_limit_s)
            except InfeasibleBudget:
                plan = None
        if not planned.batch_size:
            planned = one or (plain if plan is None else LargestBatch(1, plan.peak_bytes, plan.overhead))
    return dataclasses.replace(found, plain=plain, planned=planned)
