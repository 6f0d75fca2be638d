"""What the calls of a joint graph take on this machine: each kind of call is run alone, on numbers made up for it.

A roofline knows arithmetic and traffic. On a CPU, what a step of small operators takes is mostly neither: a call costs
microseconds, and so does a view, of which some models make several for each operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.graph_mode import _aot, nodes
from remat.torch.graph_mode.calls import Calls
from remat.torch.graph_mode.layouts import InLayout
from remat.torch.graph_mode.nodes import Fill
from remat.torch.trace import lone_calls

_LEAST_TIME_S: Final = 3e-4
"""A call is repeated until it takes this long together. Reading the clock takes a thousandth of it. A longer time makes
the first call of a step wait; a shorter one times a view worse."""

_ROUNDS: Final = 3
"""Rounds of such repetitions, of which the quickest counts: whatever disturbs a call makes it longer. A judgement."""

_NAMESPACES: Final = frozenset({"aten", "prims", "remat"})
"""Whose operators are run: they compute and do nothing else. A collective or an operator of somebody's own is not."""


class TimedCalls:
    """The seconds of each kind of call: one operator with arguments of the same shapes, strides, dtypes and numbers."""

    def __init__(self) -> None:
        self._known: dict[Any, float | None] = {}
        self._calls = Calls()

    def of_step(self, joint: fx.GraphModule, most_bytes: int) -> dict[fx.Node, float]:
        """The seconds of each operator of a joint graph, those of the views that it reads first counted with it.

        Args:
            joint: the graph.
            most_bytes: what a call may read and make. A larger one is not run, so that timing takes no more memory than
                the step.
        """
        found: dict[fx.Node, float] = {}
        seen: set[fx.Node] = set()
        calls = [node for node in joint.graph.nodes if nodes.is_call(node)]
        gpus = {device.index or 0 for device in map(nodes.device_of, calls) if device.type == "cuda"}
        with _private.no_modes(), torch.random.fork_rng(sorted(gpus)), torch.no_grad(), _aot.below_autograd():
            for node in calls:
                seconds = self._seconds(node, most_bytes)
                if seconds is not None:
                    views = [one for one in _views_read(node) if one not in seen]
                    seen.update(views)
                    found[node] = seconds + sum(self._seconds(view, most_bytes) or 0.0 for view in views)
        return found

    def _seconds(self, node: fx.Node, most_bytes: int) -> float | None:
        if not _only_computes(node) or nodes.moved_bytes(node) > most_bytes:
            return None
        args, kwargs = nodes.arguments(node)
        target = (node.target.func, node.target.__name__) if isinstance(node.target, Fill | InLayout) else node.target
        key = (target, lone_calls.kind((args, kwargs)), lone_calls.kind(node.meta.get("val")))
        if key not in self._known:
            self._known[key] = self._timed(self._calls.function_of(node), node.target, args, kwargs)
        return self._known[key]

    @staticmethod
    def _timed(function: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> float | None:
        try:
            args, kwargs = lone_calls.made_up(target, tuple(args), dict(kwargs))
            wait = torch.cuda.synchronize if _is_on_gpu((args, kwargs)) else _nothing
            function(*args, **kwargs)  # The first call may look things up.
            repeats = 1
            while (spent_s := _time_of_s(function, args, kwargs, repeats, wait)) < _LEAST_TIME_S:
                repeats *= 2
            rounds = (_time_of_s(function, args, kwargs, repeats, wait) for _ in range(_ROUNDS - 1))
            return min(spent_s, *rounds) / repeats
        except Exception:  # Whatever it is that made-up numbers do not do, the roofline is there.
            return None


def _time_of_s(function: Callable[..., Any], args: Any, kwargs: Any, repeats: int, wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        function(*args, **kwargs)
    wait()
    return time.perf_counter() - started


def _only_computes(node: fx.Node) -> bool:
    if isinstance(node.target, Fill | InLayout):
        return True
    func = node.target
    return isinstance(func, OpOverload) and func.namespace in _NAMESPACES and lone_calls.may_run_alone(func)


def _views_read(node: fx.Node) -> Iterator[fx.Node]:
    """The views that a call reads, and those that they are views of."""
    for read in node.all_input_nodes:
        while nodes.is_view(read):
            if not nodes.is_part(read):
                yield read
            read = read.all_input_nodes[0]


def _is_on_gpu(arguments: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in _private.tree_leaves(arguments))


def _nothing() -> None:
    """A CPU is done when it returns."""
