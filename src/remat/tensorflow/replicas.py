"""Replicas under ``tf.distribute``: which device a step is planned for, and what cannot be planned there.

A budget is one of a device. Under ``MirroredStrategy`` the replicas of a process share one traced function, of which
each replica's part is planned by itself; under ``MultiWorkerMirroredStrategy`` each process traces its own, and all
follow one plan.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.ranks import Ranks, plan_of_all
from remat.fit.request import Request
from remat.tensorflow._processes import ProcessStore, replica_numbers
from remat.tensorflow.peak.device import Device


@dataclass(frozen=True)
class Replica:
    """One of several replicas of a step.

    Attributes:
        device: the full name of the device that it runs on.
        local_devices: those of all replicas in this process.
        count: replicas in all processes.
        process: the number of its process.
    """

    device: str
    local_devices: tuple[str, ...]
    count: int
    process: int = 0

    @property
    def ranks(self) -> Ranks | None:
        """The processes; None where there is one only."""
        processes = self.count // len(self.local_devices)
        return None if processes == 1 else Ranks(self.process, processes, ProcessStore())

    @property
    def memory(self) -> Device:
        """Its device, with the memory that it has to itself.

        All CPU devices of a process share one allocator, hence one counter; replicas are alike, so each is counted at
        its share.
        """
        spec = tf.DeviceSpec.from_string(self.device)
        alike = [one for one in self.local_devices if tf.DeviceSpec.from_string(one).device_type == spec.device_type]
        return Device(f"{spec.device_type}:{spec.device_index}", len(alike) if spec.device_type == "CPU" else 1)

    def has_others_in(self, graph: tf.Graph) -> bool:
        """Does a function hold operations of other replicas, too?"""
        others = set(self.local_devices) - {self.device}
        return any(op.device in others for op in graph.get_operations())


def replica_here(caller: str) -> Replica | None:
    """The replica whose step is being traced here; None where there is only one.

    Args:
        caller: what the user called, for the error.

    Raises:
        UnsupportedStep: under a strategy of several replicas, but outside of ``strategy.run``.
    """
    if not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return None
    context = tf.distribute.get_replica_context()
    if context is None:
        raise UnsupportedStep(
            f"{caller} was called under {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas, "
            "outside of strategy.run, where no replica's device is known; call it in the function that strategy.run is "
            "given"
        )
    devices = tuple(strategy.extended.worker_devices)
    local, number = replica_numbers(context)
    return Replica(devices[local], devices, strategy.num_replicas_in_sync, number // len(devices))


def check_can_be_planned(replica: Replica | None, caller: str, request: Request, *, in_xla: bool) -> None:
    """Refuse what replicas do not have.

    Raises:
        UnsupportedStep: for XLA, or a lever other than "recompute".
    """
    if replica is None or not request.plans:
        return
    if in_xla:
        raise UnsupportedStep(
            f"{caller} plans for {replica.count} replicas, and their step is compiled with XLA, whose programs remat "
            "plans for one device only; leave jit_compile out (in Keras: jit_compile=False)"
        )
    if others := [lever for lever in request.levers if lever not in ("recompute", "micro_batches")]:
        raise UnsupportedStep(
            f"{caller} plans for {replica.count} replicas, which do not have the lever {others[0]!r}; leave it out of "
            f"levers={request.levers!r}"
        )


def refuse_replicas(caller: str, instead: str) -> None:
    """Refuse a call under a strategy of several replicas.

    Args:
        caller: what the user called.
        instead: what to do.

    Raises:
        UnsupportedStep: there.
    """
    if tf.distribute.has_strategy() and (count := tf.distribute.get_strategy().num_replicas_in_sync) > 1:
        raise UnsupportedStep(f"{caller} plans for one device, and the step runs on {count} replicas; {instead}")


def planned_for_all(replica: Replica | None, graph: Graph, request: Request, make: Callable[[], Plan]) -> Plan:
    """The plan of the first process, where a step runs in several; else what ``make`` makes.

    Args:
        replica: whose step it is; None where there is one device only.
        graph: the step as this process has traced it.
        request: what the user of this process asked for.
        make: makes the plan.

    Raises:
        PlanMismatch: in every process, where two of them are about to run different steps.
        InfeasibleBudget: in every process, where no plan fits.
    """
    ranks = None if replica is None else replica.ranks
    if ranks is None:
        return make()
    asked = {"budget": request.budget, "TensorFlow": tf.__version__}
    return plan_of_all(ranks, f"remat/plan/{next(_steps)}", graph, asked, make)


def measured_by_all(replica: Replica | None, measured_bytes: int) -> int:
    """The most that a process has measured of a step that all of them have run.

    Raises:
        PlanMismatch: where one of them does not say.
    """
    ranks = None if replica is None else replica.ranks
    if ranks is None:
        return measured_bytes
    return max(int(one) for one in ranks.said_by_all(f"remat/measured/{next(_steps)}", str(measured_bytes)))


_steps = itertools.count()
"""What this process has talked of with the others: each of them plans the same steps, in the same order."""


class PlansOfReplicas:
    """The plans of the replicas that share a function: replicas that are alike follow the same one."""

    def __init__(self) -> None:
        self._by_function: weakref.WeakKeyDictionary[Any, list[Plan]] = weakref.WeakKeyDictionary()

    def of(self, function: tf.Graph) -> list[Plan]:
        """Plans so far, in the order of the replicas."""
        return list(self._by_function.get(function, ()))

    def known_for(self, function: tf.Graph, graph: Graph) -> Plan | None:
        """The plan of an earlier replica whose part of the function is the same."""
        return next((plan for plan in self.of(function) if plan.fingerprint == graph.fingerprint), None)

    def add(self, function: tf.Graph, plan: Plan) -> None:
        """One more."""
        self._by_function.setdefault(function, []).append(plan)


plans_of_replicas = PlansOfReplicas()
