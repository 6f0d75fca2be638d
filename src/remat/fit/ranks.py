"""One plan for all processes of a distributed step, or one error in all of them.

Processes that run different programs wait for each other in a collective for ever. So each says, in the key-value store
in which the engine's processes found each other, which step it has traced; where all have traced the same, the first
process makes the plan, and all follow it. The store takes no part in collectives: nothing can get out of step by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import remat
from remat.core.errors import InfeasibleBudget, PlanMismatch, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_from_json

PATIENCE_S: Final = 600.0
"""How long a process waits for the others to trace and to plan. A judgement, not measured: a large model is planned in
minutes, and processes of one machine take turns. Too short, a slow process is taken for a lost one; too long, a lost
one is noticed late."""

_SHOWN_DIGITS: Final = 16  # Of a fingerprint: two that differ do so in the first of them, all but certainly.


class Store(Protocol):
    """Where processes leave words for one another."""

    def put(self, key: str, value: str) -> None:
        """Write a value once."""

    def get(self, key: str, timeout_s: float) -> str | None:
        """The value of a key, as soon as somebody has written it; None where nobody has in that time."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a distributed step, as one of them sees them.

    Attributes:
        number: of this process, from 0.
        count: of processes.
        store: which all of them reach.
        patience_s: how long this process waits for the others.
    """

    number: int
    count: int
    store: Store
    patience_s: float = PATIENCE_S

    def said_by_all(self, key: str, mine: str) -> list[str]:
        """What each process says under a key, by number.

        Raises:
            PlanMismatch: where some do not say anything in time; it names them.
        """
        self.store.put(f"{key}/{self.number}", mine)
        said = [self.store.get(f"{key}/{other}", self.patience_s) for other in range(self.count)]
        if missing := [other for other, one in enumerate(said) if one is None]:
            raise PlanMismatch(
                f"rank {self.number} is about to run a planned step, and ranks {missing} have planned none in "
                f"{self.patience_s:.0f} s. All processes plan the same steps: give all of them batches of the same "
                "shapes, or see why these are gone"
            )
        return [one for one in said if one is not None]

    def said_by_first(self, key: str) -> str:
        """What the first process says under a key.

        Raises:
            PlanMismatch: where it does not say anything in time.
        """
        found = self.store.get(key, self.patience_s)
        if found is None:
            raise PlanMismatch(
                f"rank {self.number} waited {self.patience_s:.0f} s for the plan of rank 0, which is gone"
            )
        return found


def _described(said: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in said.items())


def check_alike(said: Sequence[Mapping[str, str]], described: Callable[[Mapping[str, str]], str] = _described) -> None:
    """Make sure that all processes are about to run the same step.

    Args:
        said: by rank, what each says of its step: words by what they mean.
        described: the same as one phrase.

    Raises:
        PlanMismatch: naming what the first rank and the first that differs from it have said.
    """
    for other, theirs in enumerate(said):
        if dict(theirs) != dict(said[0]):
            raise PlanMismatch(
                f"ranks 0 and {other} are about to run different steps: {described(said[0])} on rank 0, "
                f"{described(theirs)} on rank {other}. All processes need the same model, batches of the same shapes, "
                "the same budget and the same versions"
            )


def plan_of_all(ranks: Ranks, key: str, graph: Graph, asked: Mapping[str, object], make: Callable[[], Plan]) -> Plan:
    """The plan that all processes follow, which the first of them makes.

    Args:
        ranks: the processes.
        key: under which they talk of this step, and of no other.
        graph: the step that this process has traced.
        asked: what else must be the same in all of them: the budget, versions.
        make: makes the plan; called in the first process only.

    Raises:
        PlanMismatch: in every process, if two have traced different steps, ask for different budgets or run different
            versions, or if one traces none.
        InfeasibleBudget: in every process, where the first finds no plan.
        UnsupportedStep: in every other process, where the first fails in another way.
    """
    mine = {
        "operations": str(len(graph.ops)),
        "fingerprint": graph.fingerprint.partition(":")[2][:_SHOWN_DIGITS],
        "remat": remat.__version__,
        **{name: str(value) for name, value in asked.items()},
    }
    check_alike([json.loads(one) for one in ranks.said_by_all(f"{key}/step", json.dumps(mine))])
    if ranks.number == 0:
        try:
            plan = make()
        except Exception as error:
            ranks.store.put(f"{key}/plan", json.dumps({"refused": _refusal(error)}))
            raise
        ranks.store.put(f"{key}/plan", json.dumps(plan.to_json()))
        return plan
    answer = json.loads(ranks.said_by_first(f"{key}/plan"))
    if "refused" in answer:
        raise _raised_elsewhere(answer["refused"])
    return plan_from_json(answer)


def _refusal(error: Exception) -> dict[str, object]:
    words: dict[str, object] = {"message": str(error), "type": type(error).__name__}
    if isinstance(error, InfeasibleBudget):
        words |= {name: getattr(error, name) for name in ("minimum_bytes", "budget_bytes", "binding_op")}
    return words


def _raised_elsewhere(words: dict[str, object]) -> Exception:
    if "minimum_bytes" in words:
        return InfeasibleBudget(
            str(words["message"]),
            minimum_bytes=int(str(words["minimum_bytes"])),
            budget_bytes=int(str(words["budget_bytes"])),
            binding_op=str(words["binding_op"]),
        )
    return UnsupportedStep(f"rank 0 could not plan the step: {words['type']}: {words['message']}")
