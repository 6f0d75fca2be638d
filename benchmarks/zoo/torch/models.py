"""The models of PyTorch's zoo: architectures of transformers from small configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import transformers

from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.torch.subject import TorchModel

WORDS: Final = 500
BATCH, LENGTH = 8, 128

Batch = Callable[[], dict[str, Any]]

TEXT: Final = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "vocab_size": WORDS,
}
"""Sizes as most text models call them: a step takes some 50 to 100 MiB and a quarter of a second."""

TOKENS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _ids(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, length), generator=torch.Generator().manual_seed(5))


def causal() -> dict[str, Any]:
    """Tokens that predict the next ones, no mask."""
    return {"input_ids": _ids(), "labels": _ids(), "use_cache": False}


def padded_causal() -> dict[str, Any]:
    """The same where half of the rows are shorter."""
    return causal() | {"attention_mask": _half_padded()}


def masked() -> dict[str, Any]:
    """Tokens with labels of their own and a mask that hides nothing."""
    return {"input_ids": _ids(), "labels": _ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def padded() -> dict[str, Any]:
    """The same where half of the rows are shorter."""
    return masked() | {"attention_mask": _half_padded()}


def _half_padded() -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[::2, 2 * LENGTH // 3 :] = 0
    return mask


def translated() -> dict[str, Any]:
    """A text and the one that it becomes."""
    return {"input_ids": _ids(), "labels": _ids(length=LENGTH // 2)}


def pictures(side: int = 96) -> dict[str, Any]:
    """Pictures with a class each."""
    draws = torch.Generator().manual_seed(6)
    return {
        "pixel_values": torch.randn(BATCH, 3, side, side, generator=draws),
        "labels": torch.randint(0, 2, (BATCH,), generator=draws),
    }


def segments() -> dict[str, Any]:
    """Pictures with a class for each pixel."""
    draws = torch.Generator().manual_seed(6)
    return {
        "pixel_values": torch.randn(4, 3, 128, 128, generator=draws),
        "labels": torch.randint(0, 2, (4, 128, 128), generator=draws),
    }


def speech() -> dict[str, Any]:
    """A spectrogram and its words."""
    draws = torch.Generator().manual_seed(6)
    return {"input_features": torch.randn(4, 80, 300, generator=draws), "labels": _ids(4, 32)}


def captions() -> dict[str, Any]:
    """Pictures and texts that belong together."""
    pixels = torch.randn(BATCH, 3, 64, 64, generator=torch.Generator().manual_seed(6))
    return {"input_ids": _ids(length=64), "pixel_values": pixels, "return_loss": True}


def model(name: str, batch: Batch, config: dict[str, Any] | None = None, head: str = "ForCausalLM") -> Any:
    """A model of transformers: ``name`` is the beginning of its classes, ``config`` what differs from the defaults."""

    def build() -> TorchModel:
        own = getattr(transformers, f"{name}Config")(**(TEXT if config is None else config))
        return TorchModel(lambda: getattr(transformers, f"{name}{head}")(own), batch())

    return build


def _attention(how: str) -> dict[str, Any]:
    return {"attn_implementation": how}


_GROUPED: Final = {**TEXT, **TOKENS, "num_key_value_heads": 2}
_HALF: Final = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
_VISION: Final = {**_HALF, "hidden_size": 192, "image_size": 96, "patch_size": 8}
_D_MODEL: Final = {
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": WORDS,
}
_T5: Final = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": WORDS}
_CLIP: Final = {
    "text_config": {**_HALF, "vocab_size": WORDS},
    "vision_config": {**_HALF, "image_size": 64, "patch_size": 8},
    "projection_dim": 64,
}
_GPT2: Final = {"n_embd": 192, "n_layer": 4, "n_head": 6, "vocab_size": WORDS, "n_positions": LENGTH, **TOKENS}
_WHISPER: Final = {**_D_MODEL, "max_source_positions": 150, "max_target_positions": 64, "decoder_start_token_id": 1}
_EXPERTS: Final = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
_ENDS: Final = {"cls_token_id": 1, "sep_token_id": 2}
_IMAGES: Final = "ForImageClassification"

MODELS: Final[Models] = {
    "GPT-2": model("GPT2", causal, _GPT2, "LMHeadModel"),
    "GPT-2 eager attention": model("GPT2", causal, _GPT2 | _attention("eager"), "LMHeadModel"),
    "GPT-NeoX": model("GPTNeoX", causal),
    "OPT": model("OPT", causal, {**TEXT, "ffn_dim": 768, "word_embed_proj_dim": 192}),
    "BLOOM": model("Bloom", causal, {"hidden_size": 192, "n_layer": 4, "n_head": 6, "vocab_size": WORDS}),
    "Llama": model("Llama", causal, _GROUPED),
    "Llama padded": model("Llama", padded_causal, _GROUPED),
    "Llama eager attention": model("Llama", causal, _GROUPED | _attention("eager")),
    "Mistral": model("Mistral", causal, {**_GROUPED, "sliding_window": 64}),
    "Qwen2": model("Qwen2", causal, _GROUPED),
    "Qwen3": model("Qwen3", causal, {**_GROUPED, "head_dim": 32}),
    "Gemma 2": model("Gemma2", causal, {**_GROUPED, "head_dim": 32}),
    "Phi": model("Phi", causal, {**TEXT, **TOKENS}),
    "Phi-3": model("Phi3", causal, _GROUPED),
    "Cohere": model("Cohere", causal, _GROUPED),
    "OLMo 2": model("Olmo2", causal, _GROUPED),
    "Mixtral": model("Mixtral", causal, _EXPERTS),
    "Mamba": model("Mamba", causal, {"hidden_size": 96, "num_hidden_layers": 2, "state_size": 8, "vocab_size": WORDS}),
    "BERT": model("Bert", masked, head="ForMaskedLM"),
    "BERT padded": model("Bert", padded, head="ForMaskedLM"),
    "BERT eager attention": model("Bert", padded, TEXT | _attention("eager"), "ForMaskedLM"),
    "RoBERTa": model("Roberta", masked, {**TEXT, "max_position_embeddings": LENGTH + 2}, "ForMaskedLM"),
    "ELECTRA": model("Electra", masked, {**TEXT, "embedding_size": 96}, "ForMaskedLM"),
    "ALBERT": model("Albert", masked, {**TEXT, "embedding_size": 96}, "ForMaskedLM"),
    "DeBERTa-v2": model("DebertaV2", masked, TEXT, "ForMaskedLM"),
    "DistilBERT": model(
        "DistilBert", masked, {"dim": 192, "hidden_dim": 768, "n_layers": 4, "n_heads": 6, "vocab_size": WORDS},
        "ForMaskedLM",
    ),
    "ModernBERT": model("ModernBert", padded, {**TEXT, "pad_token_id": 0, **_ENDS}, "ForMaskedLM"),
    "BART": model("Bart", translated, {**_D_MODEL, **TOKENS}, "ForConditionalGeneration"),
    "T5": model("T5", translated, {**_T5, "decoder_start_token_id": 0}, "ForConditionalGeneration"),
    "Whisper": model("Whisper", speech, {**_WHISPER, **TOKENS}, "ForConditionalGeneration"),
    "ViT": model("ViT", pictures, _VISION, _IMAGES),
    "DeiT": model("DeiT", pictures, _VISION, _IMAGES),
    "DINOv2": model("Dinov2", pictures, {**_VISION, "patch_size": 8}, _IMAGES),
    "Swin": model(
        "Swin", pictures,
        {"image_size": 96, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 6},
        _IMAGES,
    ),
    "ConvNeXt": model("ConvNext", pictures, {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 4, 2]}, _IMAGES),
    "ResNet": model("ResNet", pictures, {"hidden_sizes": [64, 128, 256], "depths": [2, 2, 2]}, _IMAGES),
    "MobileNetV2": model("MobileNetV2", pictures, {"image_size": 96}, _IMAGES),
    "Segformer": model(
        "Segformer", segments, {"hidden_sizes": [16, 32, 64, 128], "decoder_hidden_size": 64, "num_labels": 2},
        "ForSemanticSegmentation",
    ),
    "CLIP": model("CLIP", captions, _CLIP, "Model"),
}  # fmt: skip
