"""One plan for all processes of a sharded step, or one error in all of them.

Under ``fully_shard`` a recomputation may gather a parameter early, so that processes with other plans would wait for
each other for ever. Before the first step under a plan, each process therefore says in the process group's store which
step it has traced and how it will run it. A store takes no part in collectives: nothing can get out of step by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

import remat
from remat.fit.ranks import PATIENCE_S, Ranks, check_alike
from remat.torch import _private

if TYPE_CHECKING:
    from remat.torch.api.plan import StepPlan
    from remat.torch.trace.recording import Recording

_log = logging.getLogger("remat")

_rounds = 0


def plan_of_all(plan: StepPlan, recording: Recording) -> StepPlan:
    """The plan that all processes follow: rank 0's, which is usually the one that each has made.

    Args:
        plan: of this process.
        recording: the step that it is for.

    Returns:
        ``plan`` itself where this process is alone, where the step is not sharded, or where all agree.

    Raises:
        PlanMismatch: in every process, if two have traced different steps or run different versions, or if one makes no
            plan.
    """
    if not recording.is_sharded:
        return plan
    prefix, ranks = next_round("plan")
    if ranks is None:
        return plan
    mine = {"step": _digest_of_step(recording), "ops": str(recording.forward_ops), "versions": _versions()}
    said = ranks.said_by_all(f"{prefix}/step", json.dumps(mine))
    check_alike([json.loads(one) for one in said], _described)
    if ranks.number == 0:
        ranks.store.put(f"{prefix}/plan", json.dumps(list(plan.schedule)))
        return plan
    schedule = tuple(json.loads(ranks.said_by_first(f"{prefix}/plan")))
    if schedule == tuple(plan.schedule):
        return plan
    _log.info("Rank %d follows the plan of rank 0, which differs from its own.", ranks.number)

    return plan.with_schedule(schedule)


def next_round(about: str) -> tuple[str, Ranks | None]:
    """A key under which all processes talk next, and the processes; None where this one is alone.

    Args:
        about: what they talk of.
    """
    global _rounds
    if not _private.is_one_of_several():
        return "", None
    _rounds += 1
    rank, count, group_store = _private.process_group()
    return f"remat/{about}/{_rounds}", Ranks(rank, count, _Store(group_store), PATIENCE_S)


def _digest_of_step(recording: Recording) -> str:
    """What two processes of one step have in common: their shards may differ in size."""
    storages = recording.storages
    steps = [
        (op.name, op.phase, [storages[number].shape for number in op.makes])
        for op in recording.ops
        if not op.is_own_code and op.phase != "update"
    ]
    return hashlib.sha256(repr(steps).encode()).hexdigest()[:16]


def _versions() -> str:
    return f"remat {remat.__version__}, PyTorch {torch.__version__}"


class _Store:
    """The store of a process group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except Exception:  # Each kind of store has its own for a key that does not come.
            return None
        value: bytes = self._store.get(key)
        return value.decode()


def _described(said: Mapping[str, str]) -> str:
    return f"{said['ops']} operators forward, fingerprint {said['step']}, {said['versions']}"
