"""One model measured by every method: bytes, processor time in turns, differences, and what a budget was worth."""

from __future__ import annotations

import dataclasses
import mmap
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import remat
from benchmarks.zoo.frame.subject import PLAIN, Array, Prepared, Subject
from remat.fit.first_step import TOLERANCE
from remat.running.fresh_memory import measured_bytes_per_s

SHARES: Final = ("60%", "40%")
SMALLEST: Final = "smallest"

CAPTURED: Final = "remat, nothing recomputed"
"""A step that remat runs by itself in place of the framework, within a budget that leaves it as it is. What a plan's
recomputation costs is told beside this one: how the step is run makes it faster or slower, too."""

_ROOM: Final = "120%"
"""A budget that asks for nothing. At 100 % a plain step may be held to be a little over it."""

_ROUNDS: Final = 7
"""How often each method has its turn, so that a busy machine is slow for all of them alike. The median counts."""

_STEPS_OF_A_TURN: Final = 2
"""Steps of a turn that are timed, after one that is not: the first one after another method's finds the caches full of
what that one left there, as no step of a training does. It took up to 5 points more."""

_ROUNDING: Final = 2.0**-23
"""The spacing of float32 at 1. The gradient of the bias of attention's keys is 0, since softmax does not see it, and
comes out as some 5e-10 beside gradients of .3: without this, its rounding counted as a difference of 1.6."""


@dataclass(frozen=True)
class Taken:
    """What a step takes, in the median.

    Attributes:
        seconds: of a processor.
        pages: that this process fetches from the system anew.
    """

    seconds: float
    pages: float


@dataclass(frozen=True)
class Line:
    """One method of one model, prepared or refused; with the seconds that it took to refuse it, or a budget before."""

    method: str
    budget: int | str | None
    prepared: Prepared | None
    error: str = ""
    refusing_s: float | None = None


def measured(subject: Subject, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A record for each method; the first is the plain step.

    Args:
        subject: the model.
        say: is told what happens.
    """
    lines = [_tried(PLAIN, None, lambda: subject.peer(PLAIN), say)]
    plain = lines[0].prepared
    if plain is None:
        return [_record(lines[0], {}, None, [])]
    lines += [_tried(peer, None, lambda peer=peer: subject.peer(peer), say) for peer in subject.peers]
    if subject.captures:
        lines.append(_planned(subject, CAPTURED, _ROOM, say))
    for share in SHARES:
        lines.append(_planned(subject, f"remat {share}", share, say))
    lines.append(_smallest(subject, say))
    levels = {one.prepared.peak_bytes: one.method for one in lines if one.method in subject.peers and one.prepared}
    for peak_bytes, peer in sorted(levels.items(), reverse=True):
        if peak_bytes < plain.peak_bytes:
            lines.append(_planned(subject, f"remat, bytes of {peer}", peak_bytes, say))
    wanted = [np.asarray(value) for value in plain.results()]
    times = _in_turns([line for line in lines if line.prepared is not None])
    records = [_record(line, times, plain, wanted) for line in lines]
    if not subject.predicts_pages:
        bytes_per_s = measured_bytes_per_s()
        for line, record in zip(lines, records, strict=True):
            if line.prepared is not None and bytes_per_s is not None:
                record["pages_s"] = times[line.method].pages * mmap.PAGESIZE / bytes_per_s
    return records


def _planned(subject: Subject, method: str, budget: int | str, say: Callable[[str], None]) -> Line:
    return _tried(method, budget, lambda: subject.planned(budget), say, clock=subject.clock)


def _smallest(subject: Subject, say: Callable[[str], None]) -> Line:
    started = None if subject.clock is None else subject.clock()
    try:
        return _tried(f"remat, {SMALLEST}", 1, lambda: subject.planned(1), say, catches=False)
    except remat.InfeasibleBudget as error:
        refusing_s = None if subject.clock is None or started is None else subject.clock() - started
        line = _planned(subject, f"remat, {SMALLEST}", error.minimum_bytes, say)
        return dataclasses.replace(line, refusing_s=refusing_s)


def _tried(
    method: str,
    budget: int | str | None,
    make: Callable[[], Prepared],
    say: Callable[[str], None],
    *,
    catches: bool = True,
    clock: Callable[[], float] | None = None,
) -> Line:
    started = None if clock is None else clock()
    try:
        prepared = make()
    except remat.InfeasibleBudget as error:
        if not catches:
            raise
        say(f"  {method}: refused, the smallest is {error.minimum_bytes / 2**20:.2f} MiB")
        refusing_s = None if clock is None or started is None else clock() - started
        return Line(method, budget, None, f"refused: the smallest is {error.minimum_bytes}", refusing_s)
    except Exception as error:  # A peer, or a plan, that cannot run the model is a result like others.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"  {method}: {text}"[:200])
        return Line(method, budget, None, text[:300])
    say(f"  {method}: {prepared.peak_bytes / 2**20:.2f} MiB")
    return Line(method, budget, prepared)


def _in_turns(lines: Sequence[Line]) -> dict[str, Taken]:
    """What each method's step takes, all of them run in turns of several steps."""
    steps = {line.method: line.prepared for line in lines if line.prepared is not None}
    for step in steps.values():
        step.run()
    taken: dict[str, list[tuple[float, int]]] = {method: [] for method in steps}
    for _ in range(_ROUNDS):
        for method, step in steps.items():
            step.run()
            for _ in range(_STEPS_OF_A_TURN):
                started, fetched = step.clock(), _fetched_pages()
                step.run()
                taken[method].append((step.clock() - started, _fetched_pages() - fetched))
    return {method: Taken(*map(statistics.median, zip(*own, strict=True))) for method, own in taken.items()}


def _fetched_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _record(line: Line, times: dict[str, Taken], plain: Prepared | None, wanted: Sequence[Array]) -> dict[str, Any]:
    record: dict[str, Any] = {"method": line.method, "budget": line.budget}
    if line.refusing_s is not None:
        record["refusing_s"] = line.refusing_s
    if line.prepared is None or plain is None:
        return record | {"error": line.error}
    prepared = line.prepared
    limit = prepared.peak_bytes
    if prepared.budget_bytes is not None:
        limit = prepared.budget_bytes
    elif isinstance(line.budget, int):
        limit = line.budget
    elif line.budget is not None:
        limit = int(plain.peak_bytes * float(line.budget.rstrip("%")) / 100)
    return record | {
        "peak_bytes": prepared.peak_bytes,
        "beside_bytes": prepared.beside_bytes,
        "is_over": line.budget not in (None, 1) and prepared.peak_bytes > limit * (1 + TOLERANCE),
        "of_budget": None if line.budget in (None, 1) else prepared.peak_bytes / limit,
        "said": prepared.said,
        "mode": prepared.mode,
        "predicted_bytes": prepared.predicted_bytes,
        "step_s": times[line.method].seconds,
        "relative_time": times[line.method].seconds / times[PLAIN].seconds,
        "predicted": prepared.predicted,
        "planning_s": prepared.planning_s,
        "compiling_s": prepared.compiling_s,
        "sensitivity": prepared.sensitivity,
        "difference": difference(prepared.results(), wanted),
    }


def difference(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The largest difference of a value, relative to the largest value of its array.

    An array whose values are below ``_ROUNDING`` of the largest of all results is zero but for rounding: there the
    difference is relative to that largest one.
    """
    pairs = [(np.asarray(one, np.float64), np.asarray(two, np.float64)) for one, two in zip(found, wanted, strict=True)]
    largest = max((float(np.max(np.abs(theirs), initial=0.0)) for _, theirs in pairs), default=0.0)
    worst = 0.0
    for ours, theirs in pairs:
        own = float(np.max(np.abs(theirs), initial=0.0))
        scale = own if own > _ROUNDING * largest else largest
        worst = max(worst, float(np.max(np.abs(ours - theirs), initial=0.0)) / max(scale, 1e-30))
    return worst
