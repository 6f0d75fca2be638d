"""All processes of a step under ``fully_shard`` capture it, and follow one plan of it, or none of them does.

A captured step gathers and reduces in the order of its schedule. Processes with other schedules, or one that runs
eagerly beside one that does not, would wait for each other for ever. They talk in the process group's store, see
``api.ranks``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.ranks import plan_of_all
from remat.torch.api import ranks


class CapturedRanks:
    """What the processes of one function have agreed upon, as one of them sees it."""

    def __init__(self) -> None:
        self._is_capturing = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside is a call, in which the step may be captured."""
        self._is_capturing = True
        yield
        self._is_capturing = False  # After an error, what caused it is still to be told.

    def agree(self, refusal: str = "") -> None:
        """Go on only if all processes do; each says why it does not.

        Args:
            refusal: why this process cannot go on; "" where it can.

        Raises:
            UnsupportedStep: in every process that goes on, where another one does not.
        """
        if not self._is_capturing:
            return
        key, found = ranks.next_round("captured")
        if found is None:
            return
        said = found.said_by_all(key, refusal)
        refused = [(rank, one) for rank, one in enumerate(said) if one]
        if refused:
            self._is_capturing = False  # Everybody knows.
            if not refusal:
                rank, why = refused[0]
                raise UnsupportedStep(f"rank {rank} says: {why}")

    def done(self) -> None:
        """The step was captured, and runs."""
        self.agree()
        self._is_capturing = False

    def plan(self, graph: Graph, resident_bytes: int, asked: object, make: Callable[[], Plan]) -> Plan:
        """The plan that all processes follow, which rank 0 makes.

        Args:
            graph: of the step in this process.
            resident_bytes: what lies on the device beside the step.
            asked: the budget.
            make: makes the plan.

        Raises:
            PlanMismatch: in every process, if two have captured different steps.
            InfeasibleBudget: in every process, where rank 0 finds no plan.
            UnsupportedStep: in every process, where rank 0 fails in another way.
        """
        key, found = ranks.next_round("graph")
        if found is None:
            return make()
        # Parts of a parameter may differ in size.
        tensors = list(graph.tensors)
        for place in graph.inputs:
            tensors[place] = dataclasses.replace(tensors[place], size_bytes=0)
        alike = dataclasses.replace(graph, tensors=tuple(tensors))
        versions = {"budget": str(asked), "PyTorch": torch.__version__}
        try:
            plan = plan_of_all(found, key, alike, versions, make)
        except BaseException:
            self._is_capturing = False
            raise
        if found.number == 0:
            return plan
        peak_bytes = simulate(graph, plan.schedule).peak_bytes + resident_bytes
        return dataclasses.replace(plan, fingerprint=graph.fingerprint, peak_bytes=peak_bytes)

    def most(self, number: int) -> int:
        """The largest of the numbers that the processes say."""
        key, found = ranks.next_round("most")
        if found is None:
            return number
        return max(int(json.loads(one)) for one in found.said_by_all(key, json.dumps(number)))
