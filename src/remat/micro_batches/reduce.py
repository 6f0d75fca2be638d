"""What a batch's loss is of the losses of its micro-batches.

The gradients of a batch are those of its micro-batches, summed and divided once, by the denominator that the whole
batch has. The mean of the micro-batches' own losses is something else as soon as their denominators differ.
"""

from __future__ import annotations

from typing import Any, Final

from remat.core.errors import UnsupportedStep

MEAN: Final = "mean"
SUM: Final = "sum"
RATIO: Final = "ratio"

REDUCTIONS: Final = (MEAN, SUM, RATIO)
"""How a loss function combines the samples that it is given.

"mean": it returns their mean. A micro-batch counts by its share of the samples.
"sum": it returns their sum. Nothing is divided.
"ratio": it returns a pair (sum, denominator), for example of the losses of tokens and the number of tokens. The sums'
total is divided by the denominators' total, and 0 / 0 is 0: a batch that is all masked teaches nothing.
"""


def check_reduction(reduction: str) -> str:
    """The reduction that a user gave.

    Raises:
        ValueError: for one that does not exist.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, not {reduction!r}")
    return reduction


def sum_and_denominator(result: Any, reduction: str) -> tuple[Any, Any]:
    """What a loss function returned, as a value and its denominator; None for a denominator outside of "ratio".

    Raises:
        UnsupportedStep: where it returned something else than the reduction says.
    """
    is_pair = isinstance(result, tuple | list)
    if is_pair != (reduction == RATIO) or (is_pair and len(result) != 2):
        wanted = "a pair (sum, denominator)" if reduction == RATIO else "one scalar"
        returned = f"{len(result)} values" if is_pair else "one value"
        raise UnsupportedStep(
            f"with reduction={reduction!r} the function must return {wanted}, and it returned {returned}"
        )
    return (result[0], result[1]) if is_pair else (result, None)


def trained_denominator(what: str) -> UnsupportedStep:
    """The error for a denominator that would need a gradient of its own.

    Args:
        what: the denominator depends on: "argument 0, which is differentiated".
    """
    return UnsupportedStep(
        f"with reduction={RATIO!r} the denominator depends on {what}; it must count samples or tokens only. Compute it "
        "from the batch alone, or leave micro_batches at 1"
    )
