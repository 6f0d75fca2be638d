"""``limit_memory(check_first_step=True)``: is the first step under a plan the one that plain training takes?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras

from remat.fit.first_step import tell
from remat.keras.shared.variables import Variables
from remat.running.check import compare_trainings, difference_in, is_repeatable
from remat.running.workload import Array, Training

_log = logging.getLogger("remat")

Ran: TypeAlias = tuple[Any, Mapping[str, Any], Iterable[Any]]
"""What a training step returns, its logs, and the values that it leaves in ``Variables.all``, in that order."""


def checked_first_step(
    name: str, variables: Variables, run: Callable[[bool, Sequence[Array]], Ran], *, strict: bool
) -> Any:
    """Run a step plainly, plainly from weights that are half a rounding off, and under its plan; compare what is left.

    Args:
        name: the model's, for messages.
        variables: of the model, as they are before the step.
        run: runs the step, planned or not, from given values of the variables.
        strict: is it an error if the steps differ? Else it is logged.

    Returns:
        What the planned step returned. Its values are in force.

    Raises:
        PlanMismatch: if the steps differ by more than rounding, and ``strict`` asks for an error.
    """
    trainings: list[Training] = []
    returned: Any = None
    for planned, nudged in ((False, False), (False, True), (True, False)):
        returned, logs, values = run(planned, variables.first_values(nudged))
        losses = (float(keras.ops.convert_to_numpy(logs["loss"])),) if "loss" in logs else ()
        trainings.append(Training(0, 0.0, losses, variables.named(values), None, None))
    plain, off, own = trainings
    if not is_repeatable(plain, off):
        _log.warning(
            "%r trains with other random numbers each time, so its first step under the plan cannot be compared with "
            "the plain one; give random layers and functions a seed",
            name,
        )
        return returned
    comparisons = compare_trainings(plain, off, own)
    different = difference_in(comparisons)
    if different is None:
        largest = max((one.difference for one in comparisons), default=0.0)
        _log.info("The first step of %r under its plan is the plain one; they differ by %.1e at most", name, largest)
        return returned
    first, reason = different
    tell(
        f"The first step of {name!r} under its plan is not the plain one: {first.what} differ by "
        f"{first.difference:.2g} ({first.worst}), and rounding explains {first.allowed:.2g}; {reason}. Take the limit "
        "off, limit_memory(model, None), and please report the model",
        strict=strict,
    )
    return returned
