"""The flags that make Paddle's executor run a program in the order of its block, and when they are set.

The executor decides on an order when it first runs a program, by flags of the whole process. Without them copies run as
soon as their inputs are there, and nothing is saved; and with several threads a tensor is sometimes freed an operator
late. So the flags are set while a program that remat rewrote runs, and put back at once: whatever else runs keeps the
order that Paddle gives it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from remat.core.errors import UnsupportedStep
from remat.paddle import _private
from remat.paddle.first_step import FirstStep

_PLAN: Final = "_remat_plan"
"""The attribute of a program that holds the plan which it was rewritten by."""
_WAITING: Final = "_remat_waits_to_be_planned"
"""The attribute of a program that is planned when it first runs: what plans it."""
_FIRST_STEP: Final = "_remat_first_step"
"""The attribute of a program that was rewritten and did not run yet: what measures its first run."""

_FLAGS: Final = {_private.IN_ORDER: True, _private.ONE_THREAD: True, _private.MERGES_COPIES: False}


@contextlib.contextmanager
def in_program_order() -> Iterator[None]:
    """Programs that run for the first time inside of this keep the order of their blocks for good."""
    before = _private.flags(*_FLAGS)
    _private.set_flags(_FLAGS)
    try:
        yield
    finally:
        _private.set_flags(before)


class BackwardOrder:
    """The flag around a backward pass that somebody else starts: set when it reaches a result, put back at a leaf.

    ``loss.backward()`` runs the second half of a captured program. The gradient of a result is there just before that,
    and the gradient of a leaf just after.

    Args:
        after: called with the gradient of each leaf; not for a backward pass that comes from elsewhere, from a step
            without a plan say.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._before: dict[str, Any] | None = None
        self._leaves: set[int] = set()
        self._to_come: set[int] = set()

    def watch(self, results: Iterable[Any], leaves: Iterable[Any]) -> None:
        """Set the flag around the backward pass from these results to these leaves."""
        self._restore()  # A backward pass that failed left it.
        for result in results:
            if not result.stop_gradient:
                result.register_hook(self._set)
        # A leaf keeps its hooks, where Python's garbage collection does not look: they must not lead to the layer.
        put_back = weakref.WeakMethod(self._put_back)
        for leaf in leaves:
            if not leaf.stop_gradient and id(leaf) not in self._leaves:
                self._leaves.add(id(leaf))
                leaf.register_hook(functools.partial(_call_if_there, put_back, id(leaf)))

    def _set(self, _: Any) -> None:
        self._to_come = set(self._leaves)
        if self._before is None:
            self._before = _private.flags(*_FLAGS)
            _private.set_flags(_FLAGS)

    def _put_back(self, leaf: int, _: Any) -> None:
        self._restore()
        if leaf in self._to_come:
            self._to_come.remove(leaf)
            self._after()

    def _restore(self) -> None:
        if self._before is not None:
            _private.set_flags(self._before)
            self._before = None


def _call_if_there(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    if (found := method()) is not None:
        found(*args)


def plan_in(program: Any) -> Any:
    """The plan that a program was rewritten by; None for a program that remat did not touch."""
    return getattr(program, _PLAN, None)


def mark(program: Any, plan: Any, first_step: FirstStep, batch_bytes: Mapping[str, int]) -> None:
    """Note that a program was rewritten, so that every executor runs it in its order.

    Args:
        program: the program.
        plan: that it follows.
        first_step: measures the first run; what the caller feeds as tensors of Paddle is not counted there.
        batch_bytes: of its inputs, by name.
    """
    setattr(program, _PLAN, plan)
    setattr(program, _FIRST_STEP, (first_step, batch_bytes))
    _watch_executors()


def refuse_if_run(program: Any) -> None:
    """Refuse a program that some executor has run: it would go on running what it saw then.

    Raises:
        UnsupportedStep: for such a program, and for one that was rewritten already.
    """
    if plan_in(program) is not None:
        raise UnsupportedStep(
            "this program was planned already; build it again (program_guard, the model, minimize) and plan that"
        )
    if _private.was_run(program):
        raise UnsupportedStep(
            "an executor has run this program already, and goes on running it as it was then, in an order of its own; "
            "plan the program after minimize and before the first exe.run, or build it again"
        )


def plan_at_first_run(program: Any, plan: Callable[..., Any]) -> None:
    """Let a program be planned when an executor first runs it, and is given a feed: only that says how large it is.

    Args:
        program: to be planned.
        plan: plans and rewrites it; takes ``feed_shapes`` and ``fetch_list``.
    """
    setattr(program, _WAITING, plan)
    _watch_executors()


def _plan_waiting(program: Any, feed: Any, fetch_list: Any) -> None:
    plan = getattr(program, _WAITING, None)
    if plan is None or not isinstance(feed, Mapping):
        return
    shapes = {name: tuple(np.shape(value)) for name, value in feed.items()}
    setattr(program, _WAITING, None)
    try:
        plan(feed_shapes=shapes, fetch_list=list(fetch_list or ()))
    except BaseException:
        setattr(program, _WAITING, plan)
        raise


@functools.cache
def _watch_executors() -> None:
    """Let ``Executor.run`` set the flag around programs that remat rewrote; every other program passes through."""
    plain = _private.Executor.run

    @functools.wraps(plain)
    def run(self: Any, program: Any = None, *args: Any, **kwargs: Any) -> Any:
        meant = _private.program_of_run(program)
        given = _private.arguments_of_run(plain, self, program, *args, **kwargs)
        _plan_waiting(meant, given.get("feed"), given.get("fetch_list"))
        if plan_in(meant) is None:
            return plain(self, program, *args, **kwargs)
        with in_program_order(), _measured_once(meant, given.get("feed")):
            return plain(self, program, *args, **kwargs)

    _private.Executor.run = run


@contextlib.contextmanager
def _measured_once(program: Any, feed: Any) -> Iterator[None]:
    """Measure the run inside if it is the first one of a program."""
    waiting = getattr(program, _FIRST_STEP, None)
    if waiting is None:
        yield
        return
    setattr(program, _FIRST_STEP, None)
    first_step, batch_bytes = waiting
    # An executor makes tensors of arrays while it runs; tensors of Paddle lie there before.
    fed = feed.items() if isinstance(feed, Mapping) else ()
    first_step.begin(sum(batch_bytes.get(name, 0) for name, value in fed if not isinstance(value, np.ndarray | list)))
    yield
    first_step.note()
    first_step.raise_if_strict()
