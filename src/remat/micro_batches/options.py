"""The joint plan: how many micro-batches, what each of them recomputes, and why; as it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import format_bytes
from remat.core.plan import Plan

_SLOWER_SHOWN = 3  # Of the options that are slower than the best without any recomputation.


@dataclass(frozen=True)
class Option:
    """One number of micro-batches.

    Attributes:
        micro_batches: how many.
        size: samples of the largest.
        plain_time_s: predicted seconds of an update's forward and backward passes, nothing recomputed.
        plan: of one micro-batch within the budget; None where there is none, or none was made.
        minimum_bytes: where no plan fits, the smallest budget that would do.
        why_not: why none was made.
        measured_time_s: seconds of an update's passes with the plan in force; None where they were not timed.
    """

    micro_batches: int
    size: int
    plain_time_s: float
    plan: Plan | None = None
    minimum_bytes: int | None = None
    why_not: str = ""
    measured_time_s: float | None = None

    @property
    def time_s(self) -> float:
        """Seconds of an update's forward and backward passes, recomputation included; predicted if not measured."""
        if self.measured_time_s is not None:
            return self.measured_time_s
        return self.plain_time_s * (1 + self._overhead)

    @property
    def recomputes(self) -> bool:
        """Does its plan run anything twice?"""
        return self._overhead > 0

    @property
    def _overhead(self) -> float:
        return self.plan.overhead if self.plan is not None else 0.0


@dataclass(frozen=True)
class JointPlan:
    """What was chosen, and from what.

    Attributes:
        chosen: the option in force.
        options: all that were looked at, by rising number of micro-batches.
        batch_size: samples of the batch.
        budget_bytes: what the peak had to stay within.
        reason: why the chosen one, in a sentence.
        times_are_measured: False where there was no choice, or no micro-batch fits with nothing recomputed: times are
            then the cost model's.
    """

    chosen: Option
    options: tuple[Option, ...]
    batch_size: int
    budget_bytes: int
    reason: str
    times_are_measured: bool = True

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that was chosen."""
        return self.chosen.micro_batches

    def __str__(self) -> str:
        lines = [f"remat joint plan: batches of {self.batch_size} samples within {format_bytes(self.budget_bytes)}"]
        whole_s = min(option.plain_time_s for option in self.options)
        planned = max(n for n, option in enumerate(self.options) if option.plan is not None)
        shown = planned + 1 + _SLOWER_SHOWN
        if len(self.options) == shown + 1:
            shown += 1
        lines += [
            f"{'*' if option is self.chosen else ' '} {option.micro_batches:>4} x {option.size:<6}"
            f"{_described(option, whole_s)}"
            for option in self.options[:shown]
        ]
        if rest := self.options[shown:]:
            lines.append(
                f"  {rest[0].micro_batches} to {rest[-1].micro_batches} micro-batches: not planned, {self._rest}"
            )
        if not self.times_are_measured:
            lines.append(f"  times are the cost model's: {self._why_not_measured}")
        lines.append(f"  chosen: {self.reason}")
        return "\n".join(lines)

    @property
    def _why_not_measured(self) -> str:
        if any(option.micro_batches > 1 and not option.why_not.startswith("not possible") for option in self.options):
            return "no micro-batch without recomputation fits, so none was measured"
        return "there is no choice, so none was measured"

    @property
    def _rest(self) -> str:
        """Why the options behind those shown were not planned."""
        return "slower still" if self.options[-1].why_not.endswith("recomputed") else "for the same reason"


def _described(option: Option, least_s: float) -> str:
    if option.minimum_bytes is not None:
        return f"does not fit: the smallest budget is {format_bytes(option.minimum_bytes)}"
    if option.plan is None:
        return option.why_not
    pieces = option.plain_time_s / least_s - 1 if least_s else 0.0
    return (
        f"{option.time_s:.3g} s an update, peak {format_bytes(option.plan.peak_bytes)}: recomputation "
        f"{option.plan.overhead:+.1%}, size of the pieces {pieces:+.1%}"
        f"{'' if option.measured_time_s is None else ', timed'}"
    )
