"""Diffusion of PyTorch's zoo: UNets and transformers of diffusers from small configurations, with random weights.

``pip install --no-deps diffusers==0.42.1`` beside the packages of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.torch.subject import TorchModel

COUNT: Final = 4
SIDE: Final = 32
WORDS: Final = 16
"""Tokens of the text that a picture is made for."""

Inputs = dict[str, Any]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


def _steps() -> torch.Tensor:
    return torch.tensor([3, 250, 500, 999])


def latents(channels: int = 4, **others: Any) -> Inputs:
    """Noisy latents and the time steps of their noise."""
    return {"sample": _draw(COUNT, channels, SIDE, SIDE), "timestep": _steps(), **others}


def hidden(channels: int = 4, **others: Any) -> Inputs:
    """The same, as transformers name them."""
    return {"hidden_states": _draw(COUNT, channels, SIDE, SIDE), "timestep": _steps(), **others}


def denoised(module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Squared distance of what the model predicts from the noise of the batch."""
    inputs = {name: value for name, value in batch.items() if name != "noise"}
    return torch.nn.functional.mse_loss(module(**inputs, return_dict=False)[0], batch["noise"])


def diffusers_checkpointing(module: Any, on: bool) -> None:
    """Checkpointing of diffusers: each block. Raises ValueError where a model has none."""
    if on:
        module.enable_gradient_checkpointing()
    else:
        module.disable_gradient_checkpointing()


def model(name: str, inputs: Callable[[], Inputs], noise: tuple[int, ...], config: Inputs) -> Any:
    """A model of diffusers.

    Args:
        name: of its class.
        inputs: its keyword arguments.
        noise: shape of what it predicts.
        config: what differs from the defaults.
    """

    def build() -> TorchModel:
        import diffusers

        batch = {**inputs(), "noise": _draw(*noise)}
        return TorchModel(lambda: getattr(diffusers, name)(**config), batch, denoised, diffusers_checkpointing)

    return build


_HEADS: Final = {"num_attention_heads": 4, "attention_head_dim": 32}


def _grid() -> torch.Tensor:
    """Where each patch of a picture stands, as FLUX wants it: zero, row, column."""
    rows = torch.arange(SIDE // 2)
    return torch.stack(
        [torch.zeros(SIDE * SIDE // 4), *(one.flatten() for one in torch.meshgrid(rows, rows, indexing="ij"))], 1
    )


MODELS: Final[Models] = {
    "diffusers UNet2D": model(
        "UNet2DModel", lambda: latents(3), (COUNT, 3, SIDE, SIDE),
        {
            "block_out_channels": (32, 64, 96),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "norm_num_groups": 8,
        },
    ),
    "diffusers UNet2DCondition": model(
        "UNet2DConditionModel", lambda: latents(encoder_hidden_states=_draw(COUNT, WORDS, 64)),
        (COUNT, 4, SIDE, SIDE),
        {
            "block_out_channels": (32, 64, 96),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 8, "cross_attention_dim": 64, "attention_head_dim": 4,
        },
    ),
    "diffusers DiT": model(
        "DiTTransformer2DModel", lambda: hidden(class_labels=torch.arange(COUNT)), (COUNT, 4, SIDE, SIDE),
        {**_HEADS, "num_layers": 4, "sample_size": SIDE},
    ),
    "diffusers PixArt": model(
        "PixArtTransformer2DModel",
        lambda: hidden(
            encoder_hidden_states=_draw(COUNT, WORDS, 64),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
        (COUNT, 8, SIDE, SIDE),
        {**_HEADS, "num_layers": 4, "sample_size": SIDE, "cross_attention_dim": 128, "caption_channels": 64},
    ),
    "diffusers SD3": model(
        "SD3Transformer2DModel",
        lambda: hidden(16, encoder_hidden_states=_draw(COUNT, WORDS, 64), pooled_projections=_draw(COUNT, 96)),
        (COUNT, 16, SIDE, SIDE),
        {
            **_HEADS, "num_layers": 4, "sample_size": SIDE, "joint_attention_dim": 64, "caption_projection_dim": 128,
            "pooled_projection_dim": 96, "pos_embed_max_size": SIDE,
        },
    ),
    "diffusers Flux": model(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": _draw(COUNT, SIDE * SIDE // 4, 16),
            "encoder_hidden_states": _draw(COUNT, WORDS, 64),
            "pooled_projections": _draw(COUNT, 96),
            "timestep": _steps() / 1000,
            "img_ids": _grid(),
            "txt_ids": torch.zeros(WORDS, 3),
        },
        (COUNT, SIDE * SIDE // 4, 16),
        {
            **_HEADS, "in_channels": 16, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 64,
            "pooled_projection_dim": 96, "axes_dims_rope": (8, 12, 12),
        },
    ),
}  # fmt: skip
