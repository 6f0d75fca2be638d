"""Where in the model an operator belongs: the path of the module whose forward pass runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as hooks


class ModuleNames:
    """A context in which ``current`` is the dotted path of the innermost module whose forward pass runs."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        """For example ``h.0.mlp``; empty outside of any module."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> ModuleNames:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._before),
            hooks.register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if not self._stack:
            for path, inner in module.named_modules():
                self._paths[id(inner)] = path or type(module).__name__
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
