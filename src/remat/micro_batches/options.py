"""What ``micro_batches="auto"`` looked at and what it chose: an option per number of micro-batches, as printed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from remat.core.budget import format_bytes
from remat.core.plan import Plan

_MOST_LINES_AFTER_THE_LAST_PLAN: Final = 3
"""Options with more micro-batches than any that was planned are slower still: the print shows this many of them, and
sums the others up in one line. Enough to see the trend; nothing but the print depends on it."""


@dataclass(frozen=True)
class Option:
    """One number of micro-batches, and what is known of it.

    Attributes:
        micro_batches: the number.
        size: samples of the largest micro-batch.
        plain_time_s: predicted seconds of an update's forward and backward passes with nothing recomputed.
        plan: the plan of one micro-batch within the budget; None where none fits, or none was made.
        minimum_bytes: where no plan fits, the smallest budget for which one does.
        why_not: where no plan was made, the reason.
        measured_time_s: measured seconds of an update's passes under the plan; None where they were not timed.
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
        """Seconds of an update's passes, recomputation included: measured where they were timed, else predicted."""
        return self.plain_time_s * (1 + self.overhead) if self.measured_time_s is None else self.measured_time_s

    @property
    def overhead(self) -> float:
        """What recomputation adds to a micro-batch's time by its plan, as a fraction; 0 without a plan."""
        return 0.0 if self.plan is None else self.plan.overhead

    @property
    def recomputes(self) -> bool:
        """Does its plan run anything twice?"""
        return self.overhead > 0

    @property
    def is_rewritten(self) -> bool:
        """Does its plan run anything twice or in slices, so that its time is not that of plain micro-batches?"""
        return self.recomputes or (self.plan is not None and self.plan.split is not None)

    def described(self, least_time_s: float) -> str:
        """The option in a line.

        Args:
            least_time_s: predicted seconds of an update in the quickest option, with nothing recomputed.
        """
        if self.minimum_bytes is not None:
            return f"does not fit: the smallest budget is {format_bytes(self.minimum_bytes)}"
        if self.plan is None:
            return self.why_not
        lost = self.plain_time_s / least_time_s - 1 if least_time_s else 0.0
        return (
            f"{self.time_s:.3g} s per update, peak {format_bytes(self.plan.peak_bytes)}: recomputation "
            f"{self.overhead:+.1%}, small micro-batches {lost:+.1%}{'' if self.measured_time_s is None else ', timed'}"
        )


@dataclass(frozen=True)
class MicroBatchChoice:
    """The number of micro-batches that ``micro_batches="auto"`` chose, and what it chose from.

    Attributes:
        chosen: the option in force.
        options: all options that were looked at, by rising number of micro-batches.
        batch_size: samples of the batch.
        budget_bytes: what the peak has to stay within.
        reason: why the chosen option, in a sentence.
        times_are_measured: were micro-batches timed? Otherwise times are the cost model's, because there was no choice
            or because no micro-batch fits with nothing recomputed.
    """

    chosen: Option
    options: tuple[Option, ...]
    batch_size: int
    budget_bytes: int
    reason: str
    times_are_measured: bool = True

    @property
    def micro_batches(self) -> int:
        """The number that was chosen."""
        return self.chosen.micro_batches

    def with_plan(self, plan: Plan) -> MicroBatchChoice:
        """The same choice, with another plan for the chosen option: the one that was timed, with its bound, say."""
        chosen = replace(self.chosen, plan=plan)
        options = tuple(chosen if option is self.chosen else option for option in self.options)
        return replace(self, chosen=chosen, options=options)

    def __str__(self) -> str:
        lines = [f"remat micro-batches: batches of {self.batch_size} samples within {format_bytes(self.budget_bytes)}"]
        least_time_s = min(option.plain_time_s for option in self.options)
        last_planned = max(n for n, option in enumerate(self.options) if option.plan is not None)
        shown = last_planned + 1 + _MOST_LINES_AFTER_THE_LAST_PLAN
        if len(self.options) == shown + 1:
            shown += 1  # A line that sums up one option is no shorter than the option's own.
        for option in self.options[:shown]:
            mark = "*" if option is self.chosen else " "
            lines.append(f"{mark} {option.micro_batches:>4} x {option.size:<6}{option.described(least_time_s)}")
        if rest := self.options[shown:]:
            reason = "slower still" if rest[-1].why_not.endswith("recomputed") else "for the same reason"
            lines.append(f"  {rest[0].micro_batches} to {rest[-1].micro_batches} micro-batches: not planned, {reason}")
        if not self.times_are_measured:
            lines.append(f"  times are the cost model's: {self._why_not_measured}")
        lines.append(f"  chosen: {self.reason}")
        return "\n".join(lines)

    @property
    def _why_not_measured(self) -> str:
        if any(option.micro_batches > 1 and not option.why_not.startswith("not possible") for option in self.options):
            return "no micro-batch fits with nothing recomputed, so none was timed"
        return "there is no choice, so none was timed"
