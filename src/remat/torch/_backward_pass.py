"""Runs of autograd's engine: what is called around them, and from where each place of autograd's graph gets gradients.

The symbols are where this file looks for them in PyTorch 2.9 to 2.15; ``tests/torch/test_torch_contributions.py``
checks each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from remat.torch._private import STANDS_FOR

_Around: TypeAlias = Callable[[Callable[[], Any]], Any]

_run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

_PLACE_OF_INPUTS: Final = 4
"""Where ``torch.autograd.grad`` hands its inputs to the engine."""


class BackwardPass:
    """One run of the engine.

    Args:
        roots: where it begins: tensors, or edges of autograd's graph.

    Attributes:
        sums: for whoever adds gradients up himself during this run, by what they belong to.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = tuple(roots)
        self._edges: Counter[Any] | None = None
        self.sums: dict[Any, Any] = {}

    @property
    def edges(self) -> Counter[Any]:
        """How many gradients are added up at each place of autograd's graph, by ``edge_key``."""
        if self._edges is None:
            open_edges = [_edge_of(one) if isinstance(one, torch.Tensor) else (one[0], one[1]) for one in self._roots]
            found: Counter[Any] = Counter()
            seen: set[Any] = set()
            while open_edges:
                node, place = open_edges.pop()
                if node is None:
                    continue
                found[edge_key(node, place)] += 1
                if node not in seen:
                    seen.add(node)
                    open_edges.extend(node.next_functions)
            self._edges = found
        return self._edges

    def edges_to(self, inputs: Iterable[torch.Tensor]) -> list[int]:
        """How many gradients are added up for each of some tensors."""
        return [self.edges[id(one) if one.grad_fn is None else _edge_of(one)] for one in inputs]


def _edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    return tensor.grad_fn, tensor.output_nr


def edge_key(node: Any, place: int) -> Any:
    """A name for a place of autograd's graph. All leaves that stand for one tensor have one, ``stand_in_key`` of it."""
    if type(node).__name__ != "AccumulateGrad":
        return node, place
    instead = vars(node.variable).get(STANDS_FOR)
    return id(node.variable) if instead is None else stand_in_key(instead)


def stand_in_key(tensor: torch.Tensor) -> Any:
    """The ``edge_key`` of all leaves that stand for a tensor."""
    return STANDS_FOR, id(tensor)


def running_function() -> Any:
    """Inside a backward pass: the node of autograd's graph that runs."""
    return torch._C._current_autograd_node()


_around: list[_Around] = []
_running: list[BackwardPass] = []
_counts: list[list[int]] = []


def around_backward_passes(around: _Around) -> None:
    """From now on call a function in place of each backward pass, with what runs it."""
    _around.append(around)
    torch.autograd._engine_run_backward = _run_surrounded  # type: ignore[attr-defined]


def no_longer_around_backward_passes(around: _Around) -> None:
    """Undo ``around_backward_passes``."""
    if around in _around:
        _around.remove(around)
    if not _around:
        torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]


def note_backward_passes() -> None:
    """From now on ``backward_pass`` knows the one that runs."""
    if _as_it_is not in _around:
        around_backward_passes(_as_it_is)


def _as_it_is(run: Callable[[], Any]) -> Any:
    return run()


def backward_pass() -> BackwardPass | None:
    """The run of the engine that goes on, once ``note_backward_passes`` was called; None where it is not known."""
    return _running[-1] if _running else None


@contextmanager
def counted_gradients() -> Iterator[list[int]]:
    """Inside, the list holds how many gradients were added up for each input of the last ``torch.autograd.grad``."""
    note_backward_passes()
    found: list[int] = []
    _counts.append(found)
    try:
        yield found
    finally:
        _counts.pop()


def _run_surrounded(*args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        return _run_backward(*args, **kwargs)

    for around in list(_around):
        run = partial(around, run)
    _running.append(BackwardPass(args[0]))
    if _counts and len(_running) == 1 and len(args) > _PLACE_OF_INPUTS:
        _counts[-1][:] = _running[0].edges_to(args[_PLACE_OF_INPUTS])
    try:
        return run()
    finally:
        _running.pop()
