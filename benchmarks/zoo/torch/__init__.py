"""The zoo of PyTorch: models of a library, plain, under the library's own checkpointing, and under remat."""

from benchmarks.zoo.frame.heap import environment
from benchmarks.zoo.torch.models import MODELS

__all__ = ["MODELS", "environment"]
