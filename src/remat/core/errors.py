"""Every error that remat raises on purpose, so that callers can catch one base class."""

from __future__ import annotations

from typing import Any


class RematError(Exception):
    """Base class of all errors that remat raises on purpose. They travel between processes with what they tell."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[RematError], args: tuple[Any, ...]) -> RematError:
    """An error of a kind, past its own arguments."""
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidGraph(RematError, ValueError):
    """A graph breaks a structural rule: a cycle, an id out of range, a negative size."""


class InvalidSchedule(RematError, ValueError):
    """A schedule breaks a rule.

    Attributes:
        rule: the short name of the broken rule, for example ``"missing op"``.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class InvalidBudget(RematError, ValueError):
    """A budget that cannot be read as a number of bytes."""


class InfeasibleBudget(RematError, ValueError):
    """No schedule that was found fits the budget.

    Attributes:
        minimum_bytes: the smallest peak, in bytes, that the planner could reach. Planning again
            with this budget and the same planner succeeds.
        budget_bytes: the budget that was asked for.
        binding_op: what runs at the peak of that smallest schedule, with its largest tensors.
    """

    def __init__(self, message: str, *, minimum_bytes: int, budget_bytes: int, binding_op: str) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes
        self.binding_op = binding_op

    def saying(self, message: str) -> InfeasibleBudget:
        """The same error with another message."""
        return InfeasibleBudget(
            message,
            minimum_bytes=self.minimum_bytes,
            budget_bytes=self.budget_bytes,
            binding_op=self.binding_op,
        )


class InvalidFile(RematError, ValueError):
    """A file is not what it says: truncated, of another format, or of a future version."""


class PlanMismatch(RematError, ValueError):
    """A plan was made for another graph than the one it is used with."""


class UnsupportedStep(RematError, ValueError):
    """A front end cannot rewrite this training step; the message says what to do instead."""


class UnsupportedVersion(RematError, ImportError):
    """The installed version of a framework was not tried with remat; the message names the range that was."""


class WrongImportOrder(RematError, ImportError):
    """Two frameworks can share a process in one order of imports only; the message says in which."""
