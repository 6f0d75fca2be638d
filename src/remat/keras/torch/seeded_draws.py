"""Keras' draws with a seed of their own, as operators that can be captured.

A ``Dropout(seed=3)`` of Keras makes a generator at each call, from numbers that a variable holds. A captured step
cannot read these, and a generator is no tensor. Here a draw is an operator of the seed's tensor, which makes the same
generator when it runs; so the numbers are those of Keras. Its result is kept, never drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch
from keras.src.backend.torch import random as _random

_LIBRARY: Final = torch.library.Library("remat", "FRAGMENT")
_LIBRARY.define("seeded_bernoulli(Tensor probabilities, Tensor seed) -> Tensor")
_LIBRARY.define("seeded_rand(Tensor seed, int[] size, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("seeded_normal(Tensor seed, float[] mean_std, int[] size, ScalarType dtype, Device device) -> Tensor")

_own_generator: Any = _random.torch_seed_generator


def _generator(seed: torch.Tensor) -> torch.Generator:
    """Keras' own, which it seeds with the sum of two numbers; that of a number alone is the number."""
    generator: torch.Generator = _own_generator(int(seed))
    return generator


def _bernoulli(probabilities: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(probabilities, generator=_generator(seed))


def _rand(seed: torch.Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.rand(size, generator=_generator(seed), dtype=dtype, device=device)


def _normal(
    seed: torch.Tensor, mean_and_std: Sequence[float], size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    mean, std = mean_and_std
    return torch.normal(mean, std, size, generator=_generator(seed), dtype=dtype, device=device)


def _empty(*args: Any) -> torch.Tensor:
    *_, size, dtype, device = args
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("seeded_bernoulli", _bernoulli, "CompositeExplicitAutograd")
_LIBRARY.impl("seeded_rand", _rand, "CompositeExplicitAutograd")
_LIBRARY.impl("seeded_normal", _normal, "CompositeExplicitAutograd")
torch.library.register_fake("remat::seeded_bernoulli", lambda probabilities, seed: torch.empty_like(probabilities))
torch.library.register_fake("remat::seeded_rand", _empty)
torch.library.register_fake("remat::seeded_normal", _empty)


class _Seed:
    """Stands for a generator.

    Args:
        number: that the generator is seeded with.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self.number = number


def _seed_of(seed: Any) -> _Seed:
    """In place of ``torch_seed_generator``."""
    first, second = _random.draw_seed(seed)
    return _Seed(first + second)


class _Torch:
    """PyTorch for Keras' module of random numbers: its functions draw with a ``_Seed``, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def bernoulli(self, probabilities: torch.Tensor, generator: _Seed) -> Any:
        """As ``torch.bernoulli``."""
        return torch.ops.remat.seeded_bernoulli(probabilities, generator.number)

    def rand(self, size: Sequence[int], generator: _Seed, dtype: torch.dtype | None = None, device: Any = None) -> Any:
        """As ``torch.rand``."""
        kind = dtype or torch.get_default_dtype()
        return torch.ops.remat.seeded_rand(generator.number, list(size), kind, torch.device(device))

    def normal(
        self, mean: float, std: float, size: Sequence[int], generator: _Seed, dtype: torch.dtype, device: Any
    ) -> Any:
        """As ``torch.normal``."""
        numbers = [float(mean), float(std)]
        return torch.ops.remat.seeded_normal(generator.number, numbers, list(size), dtype, torch.device(device))


@contextmanager
def captured() -> Iterator[None]:
    """Inside, Keras draws by these operators. Draws of other distributions end in an error."""
    with (
        mock.patch.object(_random, "torch", _Torch()),
        mock.patch.object(_random, "torch_seed_generator", _seed_of),
    ):
        yield
