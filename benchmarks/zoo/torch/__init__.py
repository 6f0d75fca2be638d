"""The zoo of PyTorch: models of a library, plain, under the library's own checkpointing, and under remat."""

from benchmarks.zoo.torch.models import MODELS
from benchmarks.zoo.torch.subject import environment

__all__ = ["MODELS", "environment"]
