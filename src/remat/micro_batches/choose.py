"""``micro_batches="auto"``: how many micro-batches, and what each recomputes, so that an update takes the least time.

Recomputation repeats work. Micro-batches repeat what a micro-batch costs however small it is, and leave a large machine
idle. Which is cheaper depends on the model, the machine and the budget. So the seconds of a micro-batch with nothing
recomputed are measured for a few sizes that fit; what recomputation adds is predicted by each plan; and the options
that come close to the best prediction are timed with their plans in force.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.plan import Plan
from remat.micro_batches.cut import largest_size
from remat.micro_batches.options import MicroBatchChoice, Option

Measure = Callable[[Sequence[Option]], Mapping[int, float]]
"""Times updates with the plans of some options in force, side by side: seconds by number of micro-batches, without
those that could not be timed."""

_EQUAL: Final = 0.02
"""Options whose times differ by less than this share count as equally quick, and the one with the fewest micro-batches
wins: it is nearest to the whole batch, dropout masks and all. One plan timed twice differed by 3 % on a machine with
other work (docs/micro_batches.md), so a smaller share would choose by chance."""

_DOUBT: Final = 0.25
"""Options up to this share slower than the best prediction are planned and timed. A plan predicted that recomputation
adds 10.7 % where the clock said 20 % (the Transformer of benchmarks/micro_batches, on a CPU): an update of 1.107 s took
1.20 s. Too small, the best option is not timed; too large, more options are planned than needed."""

_MOST_TIMED: Final = 3
"""Options that are timed with their plans in force, besides the best one that is run as it is. A judgement: each of
them is traced and written anew, which takes seconds."""

_TIMED_SIZES: Final = 3
"""Sizes of micro-batch that are timed with nothing recomputed: the largest that fits, its half and its quarter. A line
through three points shows what a micro-batch costs however small it is; each further size is one more to compile."""


class PieceTimes:
    """Seconds of a micro-batch with nothing recomputed, by its number of samples, from those of a few sizes.

    Between two known sizes time grows linearly. Below the smallest it falls to no less than a proportional share.
    Beyond the largest it grows by the slope of a least-squares line through all known sizes, and never faster than in
    proportion to the size.

    Args:
        known_s: seconds by number of samples; not empty.
    """

    def __init__(self, known_s: Mapping[int, float]) -> None:
        self._sizes = sorted(known_s)
        self._times_s = [known_s[size] for size in self._sizes]
        largest, longest_s = self._sizes[-1], self._times_s[-1]
        slope = longest_s / largest
        if len(self._sizes) > 1:
            mean_size = math.fsum(self._sizes) / len(self._sizes)
            mean_s = math.fsum(self._times_s) / len(self._sizes)
            spread = math.fsum((size - mean_size) ** 2 for size in self._sizes)
            together = math.fsum(
                (size - mean_size) * (s - mean_s) for size, s in zip(self._sizes, self._times_s, strict=True)
            )
            slope = min(slope, max(0.0, together / spread))
        self._slope = slope

    def __call__(self, size: int) -> float:
        """Predicted seconds of a micro-batch of ``size`` samples."""
        sizes, times_s = self._sizes, self._times_s
        if size >= sizes[-1]:
            return times_s[-1] + self._slope * (size - sizes[-1])
        if size <= sizes[0]:
            return max(times_s[0] * size / sizes[0], times_s[0] - self._slope * (sizes[0] - size))
        above = next(n for n, known in enumerate(sizes) if known >= size)
        share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times_s[above - 1] + share * (times_s[above] - times_s[above - 1])


def counts_to_try(batch_size: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: half an octave apart, as far as there are samples."""
    yield 1
    power = 2
    while power <= batch_size:
        yield power
        if power + power // 2 <= batch_size:
            yield power + power // 2
        power *= 2


def choose_for_batch(
    batch_size: int,
    budget_bytes: int,
    plan_for: Callable[[int], Plan],
    *,
    fits_plainly: Callable[[int], bool],
    predicted_s: Callable[[int], float],
    times_s: Callable[[Sequence[int]], Mapping[int, float]],
    measure: Measure | None = None,
    coupled: Sequence[str] = (),
) -> MicroBatchChoice:
    """The number of micro-batches for a batch, from what a front end knows of its micro-batches.

    A batch that fits with nothing recomputed stays whole. Otherwise the largest micro-batches that fit so are timed,
    and those of half and a quarter of their size; then see :func:`choose`.

    Args:
        batch_size: samples of the batch.
        budget_bytes: what the peak has to stay within.
        plan_for: the plan of one micro-batch, by their number; raises InfeasibleBudget.
        fits_plainly: does a micro-batch keep the budget with nothing recomputed, by their number? Raises
            UnsupportedStep for 2 and more where the batch cannot be cut.
        predicted_s: the cost model's seconds of one micro-batch with nothing recomputed, by its size.
        times_s: measured seconds of the same, for some sizes.
        measure: see :func:`choose`.
        coupled: names of the layers that couple the samples of a batch.

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
                largest = largest_size(batch_size, several[first])
                sizes = sorted({max(1, largest >> halved) for halved in range(_TIMED_SIZES)})
                piece_time_s, times_are_measured = PieceTimes(times_s(sizes)), True
        except UnsupportedStep as error:
            # Two micro-batches are still listed, with the reason why there are none.
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
    measure: Measure | None = None,
) -> MicroBatchChoice:
    """The number of micro-batches that takes the least time, among some numbers.

    Options are planned in the order of the time that they take with nothing recomputed, until that time alone is more
    than an option in full takes that has a plan. Where layers couple the samples of a batch, so that micro-batches are
    not exact, options are planned from the fewest micro-batches on, and the first that fits is chosen.

    Args:
        batch_size: samples of the batch.
        budget_bytes: what the peak has to stay within.
        plan_for: the plan of one micro-batch, by their number; raises InfeasibleBudget.
        piece_time_s: seconds of one micro-batch with nothing recomputed, by its size.
        counts: the numbers of micro-batches.
        coupled: names of the layers that couple the samples of a batch.
        only_whole: why the batch cannot be cut; empty where it can.
        times_are_measured: is ``piece_time_s`` measured, not predicted by the cost model?
        measure: times options with their plans in force. It is called once at most, and only where an option that
            recomputes or runs in slices comes close to the best; None chooses by prediction.

    Raises:
        InfeasibleBudget: where no option fits; ``minimum_bytes`` is the smallest budget among them.
    """

    def unplanned(count: int) -> Option:
        size = largest_size(batch_size, count)
        return Option(count, size, count * piece_time_s(size))

    looked_at: list[Option] = []
    failures: list[InfeasibleBudget] = []
    limit_s = math.inf  # An option that takes longer with nothing recomputed is not planned.
    for option in sorted(map(unplanned, counts), key=lambda one: one.micro_batches if coupled else one.plain_time_s):
        if why_not := _why_not_planned(option, looked_at, limit_s, bool(coupled), only_whole):
            looked_at.append(replace(option, why_not=why_not))
            continue
        try:
            planned = replace(option, plan=plan_for(option.micro_batches))
        except InfeasibleBudget as error:
            failures.append(error)
            looked_at.append(replace(option, minimum_bytes=error.minimum_bytes))
            continue
        looked_at.append(planned)
        doubt = _DOUBT if measure is not None and planned.is_rewritten else 0.0
        limit_s = min(limit_s, planned.time_s * (1 - _EQUAL) * (1 + doubt))
    fitting = [option for option in looked_at if option.plan is not None]
    if not fitting:
        smallest = min(failures, key=lambda error: error.minimum_bytes)
        if not only_whole:
            raise smallest
        raise InfeasibleBudget(
            f"{smallest}. The batch stays in one piece: {only_whole}",
            minimum_bytes=smallest.minimum_bytes,
            budget_bytes=smallest.budget_bytes,
            binding_op=smallest.binding_op,
        )
    if measure is not None and not coupled:
        fitting = _timed(fitting, measure, times_are_measured)
    least_s = min(option.time_s for option in fitting)
    chosen = min(
        (option for option in fitting if option.time_s <= least_s * (1 + _EQUAL)),
        key=lambda option: option.micro_batches,
    )
    newest = {option.micro_batches: option for option in (*looked_at, *fitting)}
    return MicroBatchChoice(
        chosen,
        tuple(newest[count] for count in sorted(newest)),
        batch_size,
        budget_bytes,
        _reason(chosen, coupled, only_whole),
        times_are_measured,
    )


def _why_not_planned(
    option: Option, looked_at: Sequence[Option], limit_s: float, is_coupled: bool, only_whole: str
) -> str:
    """Why an option needs no plan; empty where it needs one."""
    if option.micro_batches > 1:
        if only_whole:
            return f"not possible: {only_whole}"
        if any(one.minimum_bytes is not None and one.micro_batches > option.micro_batches for one in looked_at):
            return "not planned: more micro-batches do not fit"
    if is_coupled and any(one.plan is not None for one in looked_at):
        return "not planned: fewer micro-batches fit"
    if option.plain_time_s >= limit_s:
        return f"not planned: {option.plain_time_s:.3g} s per update with nothing recomputed"
    return ""


def _timed(fitting: Sequence[Option], measure: Measure, times_are_measured: bool) -> list[Option]:
    """The options to choose from: those close to the best prediction, timed; all of them where timing is no use."""
    by_time = sorted(fitting, key=lambda option: option.time_s)
    close = [option for option in by_time if option.time_s <= by_time[0].time_s * (1 + _DOUBT)][:_MOST_TIMED]
    # Its plain time is measured already. It is timed beside the others, so that the same disturbances hit all of them.
    close += [option for option in by_time if not option.is_rewritten and option not in close][:1]
    if len(close) < 2 or not any(option.is_rewritten for option in close):
        return list(fitting)
    found_s = measure(close)
    if not found_s or (len(found_s) < len(close) and not times_are_measured):
        return list(fitting)  # Seconds of the cost model cannot be held against seconds of a clock.
    return [replace(option, measured_time_s=found_s.get(option.micro_batches)) for option in close]


def _reason(chosen: Option, coupled: Sequence[str], only_whole: str) -> str:
    count, layers = chosen.micro_batches, ", ".join(coupled)
    noun = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    if only_whole:
        return f"{noun}, the only possibility"
    if coupled and count == 1:
        return f"{noun}: exact, where micro-batches would change what {layers} do"
    if coupled:
        return f"{noun}, the fewest that fit: exact recomputation does not, and {layers} see micro-batches"
    if count == 1 and not chosen.recomputes:
        return f"{noun}: the whole batch fits as it is"
    return f"{noun}, the least {'predicted' if chosen.measured_time_s is None else 'measured'} time"
