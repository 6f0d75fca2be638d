"""What a user names as checkpoints, modules or layers: what it returns is kept, all else is made again where exact."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from remat.core.errors import UnsupportedStep
from remat.torch._private import tree_leaves
from remat.torch.trace.recording import Recording
from remat.torch.trace.watcher import mark


class KeptResults(ABC):
    """The results of some modules or layers, marked with their numbers while a step is traced or captured."""

    # What a result consists of. A plain function, since Dynamo captures it.
    _leaves: ClassVar[Callable[[Any], Iterable[Any]]] = staticmethod(tree_leaves)

    @property
    @abstractmethod
    def _count(self) -> int:
        """How many modules or layers there are."""

    @abstractmethod
    def _calls_pass(self, through: Callable[[int, Any], Any]) -> AbstractContextManager[None]:
        """Inside, ``through`` is called with each one's number and result, and returns the result."""

    @abstractmethod
    def _not_called(self, number: int) -> UnsupportedStep:
        """What to raise for a module or layer that the step does not call."""

    @functools.cached_property
    def _marked(self) -> Callable[[int, Any], Any]:
        return functools.partial(_mark_leaves, type(self)._leaves, mark)

    @functools.cached_property
    def _marked_in_graph(self) -> Callable[[int, Any], Any]:
        return functools.partial(_mark_leaves, type(self)._leaves, torch.ops.remat.mark.default)

    def marking(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, in which the results are marked where it is traced."""

        @functools.wraps(loss_fn)
        def marked(*args: Any) -> Any:
            with self._calls_pass(self._marked):
                return loss_fn(*args)

        return marked

    def marking_captured(self) -> AbstractContextManager[None]:
        """A context in which the results are marked in what is captured there."""
        return self._calls_pass(self._marked_in_graph)

    def storages_in(self, recording: Recording) -> list[int]:
        """The storages of a traced step that hold the results.

        Raises:
            UnsupportedStep: where a module or layer was not called.
        """
        return [storage for number in self.called(recording.marked) for storage in recording.marked[number]]

    def called(self, marked: Collection[Any]) -> range:
        """The numbers of the modules or layers, given those that a step was marked with.

        Raises:
            UnsupportedStep: where one was not called.
        """
        for number in range(self._count):
            if number not in marked:
                raise self._not_called(number)
        return range(self._count)


def _mark_leaves(
    leaves: Callable[[Any], Iterable[Any]], how: Callable[[torch.Tensor, int], None], number: int, result: Any
) -> Any:
    for leaf in leaves(result):
        if isinstance(leaf, torch.Tensor):
            how(leaf, number)
    return result


class KeptModules(KeptResults):
    """What some modules return.

    Args:
        modules: the modules.

    Attributes:
        modules: each once.

    Raises:
        TypeError: for what is no list of modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        if isinstance(modules, nn.Module) or not all(isinstance(one, nn.Module) for one in modules):
            raise TypeError("checkpoints= takes a list of modules whose results are kept, such as list(model.blocks)")
        self.modules = tuple(dict.fromkeys(modules))

    @property
    def _count(self) -> int:
        return len(self.modules)

    @contextmanager
    def _calls_pass(self, through: Callable[[int, Any], Any]) -> Iterator[None]:
        hooks = [
            one.register_forward_hook(functools.partial(_pass_result, through, number))
            for number, one in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _not_called(self, number: int) -> UnsupportedStep:
        return UnsupportedStep(
            f"checkpoint {number} ({type(self.modules[number]).__name__}) is a module that this step does not call, or "
            "whose result it does not use; give modules on the way from the batch to the loss"
        )


def _pass_result(through: Callable[[int, Any], Any], number: int, module: nn.Module, args: Any, result: Any) -> None:
    through(number, result)
