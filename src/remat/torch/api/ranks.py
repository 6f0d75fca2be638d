"""One plan for all processes of a sharded step, or one error in all of them.

Under ``fully_shard`` a recomputation may gather a parameter early, so that processes with other plans would wait for
each other for ever. Before the first step under a plan, each process therefore says in the process group's store which
step it has traced and how it will run it. A store takes no part in collectives: nothing can get out of step by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

import remat
from remat.core.errors import PlanMismatch
from remat.torch import _private

if TYPE_CHECKING:
    from remat.torch.api.plan import StepPlan
    from remat.torch.trace.recording import Recording

_log = logging.getLogger("remat")

_PATIENCE: Final = timedelta(minutes=10)
"""How long a process waits for the others to plan. A judgement, not measured: a large model is planned in minutes, and
processes of one machine take turns. Too short, a slow process is taken for a lost one; too long, a lost one is noticed
late."""

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
    if not recording.is_sharded or not _private.is_one_of_several():
        return plan
    global _rounds
    _rounds += 1
    rank, count, store = _private.process_group()
    prefix = f"remat/plan/{_rounds}"
    mine = {"step": _digest_of_step(recording), "ops": recording.forward_ops, "versions": _versions()}
    store.set(f"{prefix}/step/{rank}", json.dumps(mine))
    keys = [f"{prefix}/step/{other}" for other in range(count)]
    try:
        store.wait(keys, _PATIENCE)
    except Exception as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise PlanMismatch(
            f"rank {rank} is about to run step {_rounds} under a plan, and ranks {missing} have made none in "
            f"{int(_PATIENCE.total_seconds())} s. Under fully_shard every process plans the same steps: give all of "
            "them batches of the same shapes"
        ) from error
    said = [json.loads(store.get(key)) for key in keys]
    for other, theirs in enumerate(said):
        if theirs != said[0]:
            raise PlanMismatch(
                f"ranks 0 and {other} are about to run different steps: {_described(said[0])} on rank 0, "
                f"{_described(theirs)} on rank {other}. Under fully_shard all processes need the same model, batches "
                "of the same shapes and the same versions"
            )
    if rank == 0:
        store.set(f"{prefix}/plan", json.dumps(list(plan.schedule)))
        return plan
    schedule = tuple(json.loads(store.get(f"{prefix}/plan")))
    if schedule == tuple(plan.schedule):
        return plan
    _log.info("Rank %d follows the plan of rank 0, which differs from its own.", rank)

    return plan.with_schedule(schedule)


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


def _described(said: dict[str, Any]) -> str:
    return f"{said['ops']} operators forward, fingerprint {said['step']}, {said['versions']}"
