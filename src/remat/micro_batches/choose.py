"""Chooses the joint plan: how many micro-batches, and what each of them recomputes, so that an update is cheapest.

Recomputation repeats work; micro-batches repeat what every piece costs however small it is, and keep a smaller machine
busy. Which is cheaper depends on the model, the machine and the budget. The seconds of a piece without recomputation
are measured once, for a few sizes that fit; what recomputation adds is predicted by the plan, and measured for the
options that the predictions leave.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.plan import Plan
from remat.micro_batches.options import JointPlan, Option

# Predicted times closer than this are equal: fewer micro-batches are nearer to the full batch, dropout and all.
_EQUAL = 0.02
# What a plan says that recomputation adds may be so much of an update too little; what is further behind is not timed.
_DOUBT = 0.25
_MOST_MEASURED = 3
_TIMED_SIZES = 3


class PieceTimes:
    """Seconds of a micro-batch without recomputation, by its size.

    Between measured sizes time grows linearly, below the smallest it stays in proportion to the fit, and beyond the
    largest it grows by the slope of a least-squares line through all of them, which is never steeper than proportional.

    Args:
        measured: seconds by number of samples; not empty.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._sizes = sorted(measured)
        self._seconds = [measured[size] for size in self._sizes]
        largest, longest = self._sizes[-1], self._seconds[-1]
        slope = longest / largest
        if len(self._sizes) > 1:
            mean_size = math.fsum(self._sizes) / len(self._sizes)
            mean_s = math.fsum(self._seconds) / len(self._sizes)
            spread = math.fsum((size - mean_size) ** 2 for size in self._sizes)
            together = math.fsum(
                (size - mean_size) * (s - mean_s) for size, s in zip(self._sizes, self._seconds, strict=True)
            )
            slope = min(slope, max(0.0, together / spread))
        self._slope = slope

    def __call__(self, size: int) -> float:
        """Predicted seconds of a micro-batch of ``size`` samples."""
        sizes, seconds = self._sizes, self._seconds
        if size >= sizes[-1]:
            return seconds[-1] + self._slope * (size - sizes[-1])
        if size <= sizes[0]:
            return max(seconds[0] * size / sizes[0], seconds[0] - self._slope * (sizes[0] - size))
        above = next(n for n, known in enumerate(sizes) if known >= size)
        share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])


def counts_to_try(batch_size: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: half an octave apart, as far as there are samples."""
    yield 1
    power = 2
    while power <= batch_size:
        yield power
        if power + power // 2 <= batch_size:
            yield power + power // 2
        power *= 2


def size_of_largest(batch_size: int, count: int) -> int:
    """Samples of the largest of ``count`` micro-batches."""
    return -(-batch_size // count)


def choose_for_batch(
    batch_size: int,
    budget_bytes: int,
    plan_for: Callable[[int], Plan],
    *,
    fits_plainly: Callable[[int], bool],
    predicted_s: Callable[[int], float],
    times_s: Callable[[Sequence[int]], Mapping[int, float]],
    measure: Callable[[Sequence[Option]], Mapping[int, float]] | None = None,
    coupled: Sequence[str] = (),
) -> JointPlan:
    """The joint plan of a batch, from what a front end can tell of its pieces.

    A batch that fits as it is stays as it is. Else the largest micro-batches that fit with nothing recomputed are
    timed, and those of half and a quarter of their size; then see :func:`choose`.

    Args:
        batch_size: samples of the batch.
        budget_bytes: what the peak has to stay within.
        plan_for: the plan of one micro-batch, by their number; raises InfeasibleBudget.
        fits_plainly: does a micro-batch keep the budget with nothing recomputed, by their number? Raises
            UnsupportedStep for 2 and more where the batch cannot be cut.
        predicted_s: the cost model's seconds of one micro-batch with nothing recomputed, by its size.
        times_s: measured seconds of the same, for some sizes.
        measure: see :func:`choose`.
        coupled: names of what couples the samples of a batch.

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    counts, only_whole = list(counts_to_try(batch_size)), ""
    piece_time_s, times_are_measured = predicted_s, False
    if fits_plainly(1):
        counts = [1]
    else:
        several = counts[1:]
        try:
            first = bisect.bisect_left(several, True, key=fits_plainly)
            if first < len(several):
                largest = size_of_largest(batch_size, several[first])
                sizes = sorted({max(1, largest >> halved) for halved in range(_TIMED_SIZES)})
                piece_time_s, times_are_measured = PieceTimes(times_s(sizes)), True
        except UnsupportedStep as error:
            only_whole, counts = str(error), [1, 2]
            piece_time_s = lambda size: predicted_s(batch_size) * size / batch_size  # noqa: E731
    return choose(
        batch_size,
        budget_bytes,
        plan_for,
        piece_time_s,
        counts=counts,
        coupled=coupled,
        only_whole=only_whole,
        times_are_measured=times_are_measured,
        measure=measure,
    )


def choose(
    batch_size: int,
    budget_bytes: int,
    plan_for: Callable[[int], Plan],
    piece_time_s: Callable[[int], float],
    *,
    counts: Sequence[int],
    coupled: Sequence[str] = (),
    only_whole: str = "",
    times_are_measured: bool = True,
    measure: Callable[[Sequence[Option]], Mapping[int, float]] | None = None,
) -> JointPlan:
    """The cheapest number of micro-batches with a plan that fits, by predicted time, or by measured where it is close.

    Where layers couple the samples of a batch, so that micro-batches are not exact, as few as fit. Options are planned
    in the order of what they take without recomputation, until that alone takes longer than the best one.

    Args:
        batch_size: samples of a batch.
        budget_bytes: what the peak has to stay within.
        plan_for: the plan of one micro-batch, by their number; raises InfeasibleBudget.
        piece_time_s: seconds of one micro-batch without recomputation, by its size.
        counts: numbers of micro-batches to try.
        coupled: names of what couples the samples of a batch.
        only_whole: why micro-batches are out of the question; empty where they are not.
        times_are_measured: is ``piece_time_s`` measured?
        measure: times updates with their plans in force, side by side: seconds by number of micro-batches, without
            those that could not be timed. Called once at most, where recomputation decides.

    Raises:
        InfeasibleBudget: where no option fits; ``minimum_bytes`` is the smallest budget among them.
    """
    waiting = [
        Option(count, size_of_largest(batch_size, count), count * piece_time_s(size_of_largest(batch_size, count)))
        for count in counts
    ]
    done: list[Option] = []
    best: Option | None = None
    # What takes longer than this with nothing recomputed is not worth a plan.
    slowest_s = math.inf
    doubt = 0.0 if measure is None else _DOUBT
    failed: InfeasibleBudget | None = None
    for option in sorted(waiting, key=lambda one: one.micro_batches if coupled else one.plain_time_s):
        why_not = ""
        if only_whole and option.micro_batches > 1:
            why_not = f"not possible: {only_whole}"
        elif option.micro_batches > 1 and any(o.minimum_bytes and o.micro_batches > option.micro_batches for o in done):
            why_not = "not planned: more micro-batches do not fit"
        elif best is not None and coupled:
            why_not = "not planned: fewer micro-batches fit"
        elif option.plain_time_s >= slowest_s:
            why_not = f"not planned: {option.plain_time_s:.3g} s an update with nothing recomputed"
        if why_not:
            done.append(Option(option.micro_batches, option.size, option.plain_time_s, why_not=why_not))
            continue
        try:
            planned = Option(option.micro_batches, option.size, option.plain_time_s, plan_for(option.micro_batches))
        except InfeasibleBudget as error:
            if failed is None or error.minimum_bytes < failed.minimum_bytes:
                failed = error
            minimum = error.minimum_bytes
            done.append(Option(option.micro_batches, option.size, option.plain_time_s, minimum_bytes=minimum))
            continue
        done.append(planned)
        if best is None or planned.time_s < best.time_s:
            best = planned
        slowest_s = min(slowest_s, planned.time_s * (1 - _EQUAL) * (1 + doubt * planned.recomputes))
    if best is None:
        assert failed is not None
        raise failed
    fits = [option for option in done if option.plan is not None]
    if measure is not None and not coupled:
        fits = _measured(fits, measure, times_are_measured)
        best = min(fits, key=lambda option: option.time_s)
        timed = {option.micro_batches: option for option in fits}
        done = [timed.get(option.micro_batches, option) for option in done]
    chosen = min(
        (option for option in fits if option.time_s <= best.time_s * (1 + _EQUAL)),
        key=lambda option: option.micro_batches,
    )
    return JointPlan(
        chosen,
        tuple(sorted(done, key=lambda option: option.micro_batches)),
        batch_size,
        budget_bytes,
        _reason(chosen, coupled, only_whole),
        times_are_measured,
    )


def _measured(
    fits: Sequence[Option], measure: Callable[[Sequence[Option]], Mapping[int, float]], times_are_measured: bool
) -> list[Option]:
    """The options that may be the best, timed where one of them recomputes."""
    by_time = sorted(fits, key=lambda option: option.time_s)
    close = [option for option in by_time if option.time_s <= by_time[0].time_s * (1 + _DOUBT)][:_MOST_MEASURED]
    # The first one that recomputes nothing is known already, if times are measured; the others are held against it.
    close += [option for option in by_time if not option.recomputes and option not in close][:1]
    if len(close) < 2 or not any(option.recomputes for option in close):
        return list(fits)
    found = measure(close)
    if not found or (len(found) < len(close) and not times_are_measured):
        return list(fits)  # Seconds of the cost model and of the clock cannot be compared.
    return [replace(option, measured_time_s=found.get(option.micro_batches)) for option in close]


def _reason(chosen: Option, coupled: Sequence[str], only_whole: str) -> str:
    count = chosen.micro_batches
    noun = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    if only_whole:
        return f"{noun}, the only possibility"
    if coupled and count == 1:
        return f"{noun}: exact, where micro-batches would change what {', '.join(coupled)} do"
    if coupled:
        return f"{noun}, the fewest that fit: exact recomputation does not, and {', '.join(coupled)} see micro-batches"
    if count == 1 and chosen.plan is not None and chosen.plan.overhead == 0:
        return f"{noun}: the whole batch fits as it is"
    return f"{noun}, the least {'predicted' if chosen.measured_time_s is None else 'measured'} time"
