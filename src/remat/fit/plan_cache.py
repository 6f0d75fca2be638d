"""Plans of earlier runs, in the user's cache folder: a script that starts again plans nothing.

A plan is looked up by all that it was made from: the step, its budget, the planner and its options, the way it is
carried out, and the versions of remat and of the frameworks. It is followed only where the real peak, asked for again,
still keeps the budget. Whatever goes wrong with the folder, the step is planned as if there were none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import remat
from remat.core.errors import InvalidFile
from remat.core.plan import Plan, load_plan
from remat.fit.candidate import Candidate
from remat.fit.request import Request

_log = logging.getLogger("remat")

ENVIRONMENT_VARIABLE: Final = "REMAT_PLAN_CACHE"
"""Names the folder; ``0``, ``off``, ``no`` or ``false`` turns the cache off."""

_OFF: Final = frozenset({"0", "off", "no", "false"})

_FRAMEWORKS: Final = ("jax", "keras", "paddle", "tensorflow", "torch")

_VERSION: Final = 4
"""Of what the planners do. Raise it where they find so much better plans that earlier ones are not worth following."""

_MOST_FILES: Final = 500  # A judgement: of some 50 kB each. Those that were used longest ago go first.


def folder() -> Path | None:
    """Where plans are kept; None where the cache is off."""
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if named.lower() in _OFF:
        return None
    if named:
        return Path(named)
    # Only a budget needs it, and a plan from a graph file should start without it.
    from platformdirs import user_cache_path

    return user_cache_path("remat", appauthor=False) / "plans"


@dataclass(frozen=True)
class Entry:
    """The place of one plan in the cache.

    Attributes:
        path: of its file; None where nothing is looked up or kept.
    """

    path: Path | None

    @classmethod
    def of(cls, candidate: Candidate, request: Request, budget_bytes: int, share_of_bytes: int, proves: bool) -> Entry:
        """The entry for all that a plan is made from.

        Args:
            candidate: the step as it would run.
            request: what was asked for.
            budget_bytes: the budget in bytes.
            share_of_bytes: what the plan shows as the plain peak.
            proves: has the plan a proven bound?
        """
        where = folder()
        # Checkpoints are named in words of the framework, and a known plan means that somebody looks after it already.
        if where is None or request.checkpoints is not None or request.known is not None:
            return cls(None)
        parts = {
            "version": [_VERSION, remat.__version__],
            "frameworks": {name: _version(name) for name in _FRAMEWORKS if name in sys.modules},
            "step": candidate.graph.fingerprint,
            "times": [op.time_s for op in candidate.graph.ops],
            "carried out": f"{type(candidate).__module__}.{type(candidate).__qualname__}",
            "budget": [budget_bytes, share_of_bytes, candidate.target_bytes(budget_bytes)],
            "planner": [request.planner, candidate.time_limit_of_a_round_s(request), sorted(request.options.items())],
            "proves": proves,
        }
        text = json.dumps(parts, sort_keys=True, default=repr)
        return cls(where / f"{hashlib.sha256(text.encode()).hexdigest()}.json.gz")

    def plan(self, candidate: Candidate, budget_bytes: int) -> Plan | None:
        """The plan of an earlier run, if its real peak keeps the budget still."""
        if self.path is None:
            return None
        started = time.perf_counter()
        try:
            plan = load_plan(self.path)
            os.utime(self.path)
        except FileNotFoundError:
            return None
        except (OSError, InvalidFile) as error:
            _log.debug("A plan of an earlier run cannot be read: %s", error)
            return None
        if not candidate.recognises(plan):
            return None
        if candidate.real_peak(plan).highest_bytes > candidate.target_bytes(budget_bytes):
            return None
        _log.info("The plan of an earlier run is followed: %s", self.path)
        return dataclasses.replace(plan, plan_seconds=time.perf_counter() - started, measured_peak_bytes=None)

    def keep(self, plan: Plan) -> None:
        """Keep a plan for later runs."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)
            _forget_the_oldest(self.path.parent)
        except OSError as error:
            _log.debug("The plan is not kept for later runs: %s", error)


def _forget_the_oldest(where: Path) -> None:
    files = list(where.glob("*.json.gz"))
    if len(files) <= _MOST_FILES:
        return
    used: list[tuple[float, Path]] = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # Another process tidies up, too.
            used.append((file.stat().st_mtime, file))
    for _, file in sorted(used)[:-_MOST_FILES]:
        file.unlink(missing_ok=True)


def _version(framework: str) -> Any:
    return getattr(sys.modules[framework], "__version__", None)
