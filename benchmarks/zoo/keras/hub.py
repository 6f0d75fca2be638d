"""Models of keras-hub for Keras' zoo, built from small configurations with random weights.

``pip install --no-deps keras-hub==0.32.0`` beside the packages of this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.zoo.frame.subject import Array, Models, Subject

CLASSES: Final = 10
WORDS: Final = 500
COUNT: Final = 8
LENGTH: Final = 128
SIDE: Final = 64

Config = dict[str, Any]
Inputs = dict[str, Array]

TEXT: Final[Config] = {
    "vocabulary_size": WORDS,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 128,
    "intermediate_dim": 512,
}
"""Sizes as most text models of keras-hub call them."""


def _ids(length: int = LENGTH, seed: int = 5) -> Array:
    return np.random.default_rng(seed).integers(3, WORDS, (COUNT, length)).astype("int32")


def _tokens(padded: bool, **others: Array) -> Inputs:
    mask = np.ones((COUNT, LENGTH), "int32")
    if padded:
        mask[::2, 2 * LENGTH // 3 :] = 0
    return {"token_ids": _ids(), "padding_mask": mask, **others}


def _classes() -> Array:
    return np.random.default_rng(6).integers(0, CLASSES, (COUNT,)).astype("int32")


def _subject(make: Callable[[], Any], x: Inputs | Array, y: Array) -> Subject:
    from benchmarks.zoo.keras.subject import KerasModel

    return KerasModel(make, x, y)


def words(name: str, config: Config, *, padded: bool = False) -> Callable[[], Subject]:
    """A decoder of keras-hub that predicts the next token: ``name`` is the beginning of its classes."""

    def build() -> Subject:
        import keras_hub

        def make() -> Any:
            backbone = getattr(keras_hub.models, f"{name}Backbone")(**config)
            return getattr(keras_hub.models, f"{name}CausalLM")(backbone, preprocessor=None)

        return _subject(make, _tokens(padded), _ids(seed=7))

    return build


def texts(name: str, config: Config, *, segments: bool = False) -> Callable[[], Subject]:
    """An encoder of keras-hub that gives a class to a text; half of the texts are padded."""

    def build() -> Subject:
        import keras_hub

        def make() -> Any:
            backbone = getattr(keras_hub.models, f"{name}Backbone")(**config)
            classifier = getattr(keras_hub.models, f"{name}TextClassifier")
            return classifier(backbone, num_classes=CLASSES, preprocessor=None)

        inputs = _tokens(padded=True, **({"segment_ids": np.zeros((COUNT, LENGTH), "int32")} if segments else {}))
        if name == "FNet":
            del inputs["padding_mask"]  # It mixes all tokens, padded ones, too.
        return _subject(make, inputs, _classes())

    return build


def images(name: str, config: Config) -> Callable[[], Subject]:
    """A picture's class by a backbone of keras-hub."""

    def build() -> Subject:
        import keras_hub

        def make() -> Any:
            backbone = getattr(keras_hub.models, f"{name}Backbone")(image_shape=(SIDE, SIDE, 3), **config)
            classifier = getattr(keras_hub.models, f"{name}ImageClassifier", keras_hub.models.ImageClassifier)
            return classifier(backbone, num_classes=CLASSES, preprocessor=None)

        pictures = np.random.default_rng(5).normal(size=(COUNT, SIDE, SIDE, 3)).astype("float32")
        return _subject(make, pictures, _classes())

    return build


def translated(name: str, config: Config) -> Callable[[], Subject]:
    """An encoder and a decoder of keras-hub, with a layer on top that predicts the decoder's next token."""

    def build() -> Subject:
        import keras
        import keras_hub

        def make() -> Any:
            backbone = getattr(keras_hub.models, f"{name}Backbone")(**config)
            decoded = backbone.output["decoder_sequence_output"]
            return keras.Model(backbone.input, keras.layers.Dense(WORDS)(decoded))

        half = LENGTH // 2
        inputs = {
            "encoder_token_ids": _ids(),
            "encoder_padding_mask": np.ones((COUNT, LENGTH), "int32"),
            "decoder_token_ids": _ids(half, 8),
            "decoder_padding_mask": np.ones((COUNT, half), "int32"),
        }
        if name == "Whisper":
            sound = np.random.default_rng(5).normal(size=(COUNT, 2 * LENGTH, 80)).astype("float32")
            inputs = {"encoder_features": sound, **{key: inputs[key] for key in inputs if key.startswith("decoder")}}
        return _subject(make, inputs, _ids(half, 7))

    return build


def _grouped(**others: Any) -> Config:
    """Sizes of a decoder whose queries share keys."""
    renamed = {key: value for key, value in TEXT.items() if key != "num_heads"}
    return {**renamed, "num_query_heads": 4, "num_key_value_heads": 2, **others}


_VIT: Final[Config] = {"patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 128}

MODELS: Final[Models] = {
    "hub GPT-2": words("GPT2", TEXT),
    "hub GPT-2 padded": words("GPT2", TEXT, padded=True),
    "hub OPT": words("OPT", TEXT),
    "hub BLOOM": words("Bloom", TEXT),
    "hub GPT-NeoX": words("GPTNeoX", TEXT),
    "hub Llama 3": words("Llama3", _grouped()),
    "hub Mistral": words("Mistral", _grouped(sliding_window=64)),
    "hub Gemma": words("Gemma", _grouped(head_dim=32)),
    "hub Qwen3": words("Qwen3", _grouped(head_dim=32)),
    "hub Mixtral": words("Mixtral", _grouped(num_experts=4)),
    "hub BERT": texts("Bert", TEXT, segments=True),
    "hub RoBERTa": texts("Roberta", TEXT),
    "hub DistilBERT": texts("DistilBert", TEXT),
    "hub ALBERT": texts("Albert", {**TEXT, "embedding_dim": 64}, segments=True),
    "hub DeBERTa-v3": texts("DebertaV3", TEXT),
    "hub FNet": texts("FNet", {key: value for key, value in TEXT.items() if key != "num_heads"}, segments=True),
    "hub ViT": images("ViT", {**_VIT, "mlp_dim": 512}),
    "hub Swin": images(
        "SwinTransformer", {"embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4, "patch_size": 4}
    ),
    "hub MiT": images(
        "MiT",
        {
            "layerwise_depths": [2, 2], "num_layers": 2, "layerwise_num_heads": [1, 2], "layerwise_sr_ratios": [4, 2],
            "max_drop_path_rate": 0.1, "layerwise_patch_sizes": [7, 3], "layerwise_strides": [4, 2],
            "hidden_dims": [32, 64],
        },
    ),
    "hub ResNet": images(
        "ResNet",
        {
            "input_conv_filters": [64], "input_conv_kernel_sizes": [7], "stackwise_num_filters": [64, 128, 256],
            "stackwise_num_blocks": [2, 2, 2], "stackwise_num_strides": [1, 2, 2], "block_type": "bottleneck_block",
        },
    ),
    "hub Whisper": translated(
        "Whisper",
        {**TEXT, "num_layers": 2, "max_encoder_sequence_length": 2 * LENGTH, "max_decoder_sequence_length": 64},
    ),
    "hub T5": translated("T5", {**TEXT, "num_layers": 2}),
}  # fmt: skip
