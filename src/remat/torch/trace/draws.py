"""Random draws: the state in which a call found its generator, and the same draw again.

A generator's state says all of what it draws next: on a CPU that of a Mersenne twister (5,056 bytes), on a GPU the seed
and the offset of Philox (16 bytes), which PyTorch holds on the host, so that asking for it waits for no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload

_DEVICES: Final = ("cpu", "cuda", "meta")
"""Where a state can be put back; on ``meta``, plans for these are made."""

# Without an argument for a generator these draw from the default one of their device, and keep nothing elsewhere, where
# cuDNN's recurrent layers have a state of their own. Read from PyTorch 2.13.
_DRAW_FROM_DEFAULT: Final = frozenset(
    {
        "aten::native_dropout",
        "aten::rand",
        "aten::rand_like",
        "aten::randint",
        "aten::randint_like",
        "aten::randn",
        "aten::randn_like",
        "aten::randperm",
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
    }
)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a random call is about to draw.

    Attributes:
        device: of the generator.
        state: of the generator, on the CPU.
    """

    device: torch.device
    state: torch.Tensor

    def again(self, func: OpOverload, args: tuple[Any, ...] | list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the operator so that it draws the same again; what others draw does not change."""
        place = _private.generator_argument(func)
        if place is None:
            return with_state(default_generator(self.device), self.state, func, args, kwargs)
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        if place < len(args):
            return func(*args[:place], generator, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, "generator": generator})


def may_draw_again(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Can this random call be made to draw the same a second time?

    An operator that takes a generator gets one of its own then; for others the default one is put back for a moment.
    """
    return _has_known_generator(func) and _device_of(func, args, kwargs).type in _DEVICES


def may_draw_again_from_default(func: OpOverload) -> bool:
    """Does this operator draw the same again where the default generator is in the state of the first time?"""
    return _has_known_generator(func) and not _private.is_mutable(func)


@cache
def _has_known_generator(func: OpOverload) -> bool:
    name = str(func.name()).partition(".")[0]
    return _private.generator_argument(func) is not None or name in _DRAW_FROM_DEFAULT


def note(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """What a random call is about to draw; None while a CUDA graph is captured, when nothing of it is known."""
    device = _device_of(func, args, kwargs)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    generator = _given_generator(func, args, kwargs)
    state = (default_generator(device) if generator is None else generator).get_state()
    return Draw(device, state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from where they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    number: int | None = device.index
    return generators[torch.cuda.current_device() if number is None else number]


def with_state(generator: torch.Generator, state: torch.Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function with a generator in another state, and put its own back."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(before)


def _given_generator(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    place = _private.generator_argument(func)
    if place is None:
        return None
    return kwargs.get("generator", args[place] if place < len(args) else None)


def _device_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a random call draws: the device of its generator, of its tensors, or the one that it is told."""
    generator = _given_generator(func, args, kwargs)
    if generator is not None:
        return generator.device
    tensor = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return torch.device("cpu") if tensor is None else tensor.device
