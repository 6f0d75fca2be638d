"""Where in the user's model an operator comes from: the module whose forward pass runs, and the line of its code."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.nn.modules import module as module_hooks

from remat.core.labels import shown_path


class RunningModules:
    """A context that knows which module's forward pass runs.

    Attributes:
        outermost: the modules that ran and that no other called.
    """

    def __init__(self) -> None:
        self.outermost: list[torch.nn.Module] = []
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        """The dotted path of the innermost module that runs, ``h.0.mlp`` say; empty outside of any module."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> RunningModules:
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._before),
            module_hooks.register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if not self._stack:
            self.outermost.append(module)
            for path, inner in module.named_modules():
                self._paths[id(inner)] = path or type(module).__name__
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()


_shown_path = cache(shown_path)
_NOT_THE_MODEL: Final = tuple(str(Path(path).parent) + "/" for path in (torch.__file__, __file__))
_REMAT: Final = str(Path(__file__).parents[1]) + "/"


def source_line() -> str:
    """The innermost line that runs outside of PyTorch and of this folder: ``model.py:12 in forward``.

    Empty where that is one of ``remat.torch``, as when the command line calls a module.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_REMAT):
        return ""
    return _shown(frame, frame.f_lineno)


def line_of(error: BaseException) -> str:
    """The innermost line of the model that an error came through; empty where it came through none."""
    found, traced = "", error.__traceback__
    while traced is not None:
        if not traced.tb_frame.f_code.co_filename.startswith((*_NOT_THE_MODEL, _REMAT)):
            found = _shown(traced.tb_frame, traced.tb_lineno)
        traced = traced.tb_next
    return found


def _shown(frame: FrameType, line: int) -> str:
    return f"{_shown_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
