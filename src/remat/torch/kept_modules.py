"""Modules that a user names as checkpoints: what they return is kept, all else is made again where that is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.core.errors import UnsupportedStep
from remat.torch._private import tree_leaves
from remat.torch.trace.recording import Recording
from remat.torch.trace.watcher import mark


class KeptModules:
    """What some modules return, marked while a step is traced or captured.

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

    def marking(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, in which what the modules return is marked where it is traced."""

        @functools.wraps(loss_fn)
        def marked(*args: Any) -> Any:
            with self._hooked(mark):
                return loss_fn(*args)

        return marked

    @contextmanager
    def marking_captured(self) -> Iterator[None]:
        """Inside, what the modules return is marked in what is captured."""
        with self._hooked(torch.ops.remat.mark.default):
            yield

    @contextmanager
    def _hooked(self, how: Callable[[torch.Tensor, int], None]) -> Iterator[None]:
        hooks = [
            one.register_forward_hook(functools.partial(_mark_results, how, number))
            for number, one in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def storages_in(self, recording: Recording) -> list[int]:
        """The storages of a traced step that hold what the modules returned.

        Raises:
            UnsupportedStep: where a module was not called.
        """
        return [storage for number in self.called(recording.marked) for storage in recording.marked[number]]

    def called(self, marked: Collection[Any]) -> range:
        """The numbers of the modules, given those that a step was marked with.

        Raises:
            UnsupportedStep: where a module was not called.
        """
        for number, module in enumerate(self.modules):
            if number not in marked:
                raise UnsupportedStep(
                    f"checkpoint {number} ({type(module).__name__}) is a module that this step does not call, or whose "
                    "result it does not use; give modules on the way from the batch to the loss"
                )
        return range(len(self.modules))


def _mark_results(how: Callable[..., None], number: int, module: nn.Module, args: Any, result: Any) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            how(leaf, number)
