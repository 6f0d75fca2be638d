"""Pictures of PyTorch's zoo: models of timm and torchvision, with random weights.

``pip install --no-deps timm==1.0.31 torchvision==0.28.0`` beside the packages of this project, in an environment of its
own: with the requirements of theirs, pip would replace PyTorch's CPU build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.torch.subject import TorchModel

CLASSES: Final = 10


def pictures(side: int, count: int) -> dict[str, torch.Tensor]:
    """Pictures with a class each."""
    draws = torch.Generator().manual_seed(6)
    return {
        "pixels": torch.randn(count, 3, side, side, generator=draws),
        "classes": torch.randint(0, CLASSES, (count,), generator=draws),
    }


def classified(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy of a classifier."""
    return torch.nn.functional.cross_entropy(module(batch["pixels"]), batch["classes"])


def timm_checkpointing(module: Any, on: bool) -> None:
    """Checkpointing of timm: each block of a stage. Raises AssertionError where a model has none."""
    module.set_grad_checkpointing(on)


def no_checkpointing(module: Any, on: bool) -> None:
    """Models of torchvision have none.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{type(module).__name__} has no checkpointing of its own")


def timm(name: str, side: int = 128, count: int = 8, **options: Any) -> Callable[[], TorchModel]:
    """A model of timm for small pictures."""

    def build() -> TorchModel:
        import timm

        def make() -> Any:
            return timm.create_model(name, num_classes=CLASSES, **options)

        return TorchModel(make, pictures(side, count), classified, timm_checkpointing)

    return build


def torchvision(name: str, side: int = 96, count: int = 8) -> Callable[[], TorchModel]:
    """A model of torchvision for small pictures."""

    def build() -> TorchModel:
        import torchvision

        def make() -> Any:
            return torchvision.models.get_model(name, num_classes=CLASSES)

        return TorchModel(make, pictures(side, count), classified, no_checkpointing)

    return build


MODELS: Final[Models] = {
    "timm mixer_s16": timm("mixer_s16_224", 224, 4),
    "timm vit_tiny": timm("vit_tiny_patch16_224", img_size=128, drop_path_rate=0.1),
    "timm swin_tiny": timm("swin_tiny_patch4_window7_224", 112, img_size=112, drop_path_rate=0.1),
    "timm convnextv2_atto": timm("convnextv2_atto"),
    "timm efficientnet_b0": timm("efficientnet_b0", drop_path_rate=0.1),
    "timm mobilenetv4_conv_small": timm("mobilenetv4_conv_small"),
    "timm regnety_002": timm("regnety_002"),
    "timm nfnet_l0": timm("nfnet_l0"),
    "timm xcit_nano": timm("xcit_nano_12_p16_224"),
    "timm levit_128s": timm("levit_128s", 224, 4),
    "timm mambaout_femto": timm("mambaout_femto"),
    "timm hrnet_w18_small": timm("hrnet_w18_small"),
    "torchvision resnet50": torchvision("resnet50"),
    "torchvision shufflenet_v2": torchvision("shufflenet_v2_x1_0"),
}
