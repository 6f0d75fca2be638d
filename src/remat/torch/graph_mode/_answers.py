"""What captured code is told that asks whether it is being compiled; of Dynamo, as ``_aot.py`` is.

Libraries have branches for compilers, which compute something else than eager PyTorch does: transformers' Mamba has
other operators there, and its Llama a mask that no eager step has. So all code is told that it runs eagerly. Some
branches for eager PyTorch cannot be captured, though: transformers sets a ``ContextVar`` there. Then the innermost
function that is in the way and asks, itself or by what it calls, is told that it is being compiled, and no other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, Final, TypeAlias

import torch
from torch._dynamo import external_utils, trace_rules
from torch._dynamo.variables import torch as functions_of_torch
from torch._guards import TracingContext

Place: TypeAlias = tuple[str, str]
"""The file and the name of a function."""

QUESTIONS: Final[tuple[Callable[[], Any], ...]] = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    external_utils.is_compiling,
    torch._utils.is_compiling,
)

# Dynamo would write a call of these into the graph, and ends with an error where PyTorch has no such device.
_ARE_STREAMS_CAPTURED: Final[tuple[Callable[[], Any], ...]] = tuple(
    device.is_current_stream_capturing
    for device in (torch.cuda, torch.xpu)
    if hasattr(device, "is_current_stream_capturing")
)

_EVERYWHERE: Final = ("", "all functions")


class Answers:
    """The answers while one function is captured, over several attempts.

    Attributes:
        told: the functions that are told that they are being compiled, with all that they call.
    """

    def __init__(self) -> None:
        self.told: list[Place] = []
        self._asked: list[list[Place]] = []
        self._stuck: list[Place] = []

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, Dynamo gives these answers."""
        self._asked.clear()
        own = functions_of_torch.tracing_state_functions()
        answered = _Answered({**own, **dict.fromkeys(_ARE_STREAMS_CAPTURED, False)}, self._is_told)
        handlers = functions_of_torch.TorchInGraphFunctionVariable._get_handlers()
        as_known = dict.fromkeys(_ARE_STREAMS_CAPTURED, handlers[torch.compiler.is_compiling])
        rules = dict.fromkeys(_ARE_STREAMS_CAPTURED, functions_of_torch.TorchInGraphFunctionVariable)
        known_rules = trace_rules.get_torch_obj_rule_map()
        module: Any = functions_of_torch
        known_functions = module.tracing_state_functions
        module.tracing_state_functions = lambda: answered
        # This stands around every step: patches that copy these tables would take half a millisecond of it.
        with _added(handlers, as_known), _added(known_rules, rules):
            try:
                yield
            finally:
                module.tracing_state_functions = known_functions

    def tell_more(self, error: Exception) -> bool:
        """Whether there is one more function to tell, after a capture has ended with an error; it is told from now on.

        Args:
            error: Dynamo's, which knows where in the captured code it was.
        """
        if _EVERYWHERE in self.told:
            return False
        asked = {place for stack in self._asked for place in stack}
        stuck = _places(getattr(error, "real_stack", None) or ())
        in_the_way = [place for place in stuck if place in asked and place not in self.told]
        # Where what was told did not help, all are told: an attempt may take many seconds.
        self.told.append(_EVERYWHERE if stuck == self._stuck or not in_the_way else in_the_way[-1])
        self._stuck = stuck
        return True

    def __str__(self) -> str:
        """The functions that are told, for people."""
        return ", ".join(f"{name} ({os.path.basename(file)})" if file else name for file, name in self.told)

    def _is_told(self) -> bool:
        stack = _places(TracingContext.extract_stack())
        self._asked.append(stack)
        return _EVERYWHERE in self.told or not set(stack).isdisjoint(self.told)


class _Answered(Mapping[Any, Any]):
    """Dynamo's table of functions with known results, with other results of those that ask for a compiler."""

    def __init__(self, own: Mapping[Any, Any], is_told: Callable[[], bool]) -> None:
        self._own = own
        self._is_told = is_told

    def __getitem__(self, function: Any) -> Any:
        return self._is_told() if function in QUESTIONS else self._own[function]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@contextmanager
def _added(table: dict[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    """Inside, a table has other entries as well, or others for some of its keys."""
    own = {key: table[key] for key in entries if key in table}
    table.update(entries)
    try:
        yield
    finally:
        for key in entries:
            del table[key]
        table.update(own)


def _places(stack: StackSummary | tuple[()]) -> list[Place]:
    return [(frame.filename, frame.name) for frame in stack]
