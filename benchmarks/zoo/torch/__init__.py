"""The zoo of PyTorch: models of libraries, plain, under the library's own checkpointing, and under remat."""

from typing import Final

from benchmarks.zoo.frame.heap import environment
from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.torch import diffusion, models, torchvision_ops, vision

torchvision_ops.define()

MODELS: Final[Models] = {**models.MODELS, **vision.MODELS, **diffusion.MODELS}

__all__ = ["MODELS", "environment"]
