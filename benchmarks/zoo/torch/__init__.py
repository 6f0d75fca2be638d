"""The zoo of PyTorch: models of libraries, plain, under the library's own checkpointing, and under remat.

``torch`` is ``remat.torch.limit_memory``, graph mode where a model can be captured; ``torch-eager`` is
``remat.torch.apply``.
"""

from typing import Final

from benchmarks.zoo.frame import heap
from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.torch import diffusion, models, torchvision_ops, vision
from benchmarks.zoo.torch.subject import MODE

torchvision_ops.define()

MODELS: Final[Models] = {**models.MODELS, **vision.MODELS, **diffusion.MODELS}


def environment(mode: str = "auto") -> dict[str, str]:
    """What a process needs that measures in this mode of ``limit_memory``, "eager" being ``apply``."""
    return {**heap.environment(), MODE: mode}


__all__ = ["MODELS", "environment"]
