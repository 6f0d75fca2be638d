"""Models of the kinds that people train, each with a batch that makes activations the larger part of its memory.

Each is a layer whose ``forward`` returns what its loss compares with the labels, so that one model trains as a static
program, under ``to_static`` and in ``paddle.Model.fit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
from paddle import nn

F = nn.functional
WORDS = 256


class Encoder(nn.Layer):
    """A Transformer as BERT has it: learned places, dropout, post-norm blocks, a loss over all words."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu")
        self.norm, self.blocks = nn.LayerNorm(width), nn.TransformerEncoder(block, blocks)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Any) -> Any:
        places = paddle.arange(ids.shape[1])
        h = F.dropout(self.norm(self.words(ids) + self.places(places)), 0.1, training=self.training)
        return self.head(self.blocks(h))


class Decoder(nn.Layer):
    """A Transformer as GPT-2 has it: pre-norm blocks, a causal mask, the output tied to the embedding."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.norms = nn.LayerList([nn.LayerNorm(width) for _ in range(2 * blocks + 1)])
        self.attend = nn.LayerList([nn.Linear(width, 3 * width) for _ in range(blocks)])
        self.project = nn.LayerList([nn.Linear(width, width) for _ in range(blocks)])
        self.widen = nn.LayerList([nn.Linear(width, 4 * width) for _ in range(blocks)])
        self.narrow = nn.LayerList([nn.Linear(4 * width, width) for _ in range(blocks)])

    def forward(self, ids: Any) -> Any:
        length, heads = ids.shape[1], 4
        h = self.words(ids) + self.places(paddle.arange(length))
        mask = paddle.triu(paddle.full([length, length], -1e4), 1)
        for number, attend in enumerate(self.attend):
            joint = attend(self.norms[2 * number](h)).reshape([0, 0, 3, heads, -1]).transpose([2, 0, 3, 1, 4])
            query, key, value = joint.unbind(0)
            scores = paddle.matmul(query, key, transpose_y=True) * query.shape[-1] ** -0.5 + mask.astype(query.dtype)
            mixed = paddle.matmul(F.dropout(F.softmax(scores), 0.1, training=self.training), value)
            h = h + self.project[number](mixed.transpose([0, 2, 1, 3]).flatten(2))
            wide = F.gelu(self.widen[number](self.norms[2 * number + 1](h)), approximate=True)
            h = h + F.dropout(self.narrow[number](wide), 0.1, training=self.training)
        return paddle.matmul(self.norms[-1](h), self.words.weight, transpose_y=True)


class Recurrent(nn.Layer):
    """LSTMs, one upon the other, over an embedding."""

    def __init__(self, width: int = 48, layers: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.LayerList([nn.LSTM(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Any) -> Any:
        h = self.words(ids)
        for layer in self.layers:
            h = h + layer(h)[0]
        return self.head(h)


class UNet(nn.Layer):
    """Convolutions down and up again, with skips between."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth)]
        self.down = nn.LayerList([_twice(3 if n == 0 else sizes[n - 1], size) for n, size in enumerate(sizes)])
        self.turn = _twice(sizes[-1], 2 * sizes[-1])
        self.grow = nn.LayerList([nn.Conv2DTranspose(2 * size, size, 2, stride=2) for size in reversed(sizes)])
        self.up = nn.LayerList([_twice(2 * size, size) for size in reversed(sizes)])
        self.head = nn.Conv2D(width, 4, 1)

    def forward(self, image: Any) -> Any:
        skips = []
        h = image
        for down in self.down:
            skips.append(down(h))
            h = F.max_pool2d(skips[-1], 2)
        h = self.turn(h)
        for number, grow in enumerate(self.grow):
            h = self.up[number](paddle.concat([grow(h), skips.pop()], axis=1))
        return self.head(h).transpose([0, 2, 3, 1])


def _twice(channels: int, made: int) -> Any:
    parts: list[Any] = []
    for given in (channels, made):
        parts += [nn.Conv2D(given, made, 3, padding=1), nn.BatchNorm2D(made), nn.ReLU()]
    return nn.Sequential(*parts)


# What Paddle 3.3 runs in bfloat16 on a CPU without oneDNN: it has no kernels of that type for the others. Its lists
# take the names that some operators had before Paddle 2.
RUN_IN_BFLOAT16 = {"dropout", "elementwise_mul", "lookup_table_v2", "scale", "split", "transpose2"}
NEED_FLOAT32 = {
    "concat",
    "elementwise_add",
    "elementwise_div",
    "fused_gemm_epilogue",
    "gelu",
    "layer_norm",
    "linear",
    "matmul_v2",
    "reduce_mean",
    "softmax",
    "square",
}


class HalfPrecision(nn.Layer):
    """A model under ``auto_cast``, which Paddle obeys on a CPU only in programs: static ones and ``to_static``'s.

    Args:
        net: the model.
        lists: of operators, where Paddle's own lists are not taken.
    """

    def __init__(self, net: Any, **lists: set[str]) -> None:
        super().__init__()
        self.net = net
        self._lists = lists

    def forward(self, inputs: Any) -> Any:
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16", **self._lists):
            result = self.net(inputs)
        return result.astype("float32")  # Paddle 3.3 fails, or crashes, where a captured layer returns bfloat16.


@dataclass(frozen=True)
class Model:
    """A model and its batch.

    Attributes:
        make: the layer.
        shape: of a batch of inputs.
        labels: of a batch of labels.
        classes: how many labels there are.
        is_text: are the inputs words?
        is_half: is it in mixed precision? Then only programs of it are, so that plain runs are captured, too.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    is_text: bool = False
    is_half: bool = False

    @property
    def dtype(self) -> str:
        return "int64" if self.is_text else "float32"

    def batch(self, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(step)
        labels = random.integers(0, self.classes, self.labels)
        if self.is_text:
            return random.integers(0, WORDS, self.shape), labels
        return random.standard_normal(self.shape).astype("float32"), labels


MODELS = {
    "resnet50": Model(lambda: paddle.vision.models.resnet50(num_classes=10), (48, 3, 64, 64), (48,), 10),
    "mobilenet_v2": Model(lambda: paddle.vision.models.mobilenet_v2(num_classes=10), (16, 3, 64, 64), (16,), 10),
    "bert": Model(Encoder, (8, 48), (8, 48), WORDS, is_text=True),
    "gpt": Model(Decoder, (8, 48), (8, 48), WORDS, is_text=True),
    "lstm": Model(Recurrent, (32, 32), (32, 32), WORDS, is_text=True),
    "unet": Model(UNet, (4, 3, 48, 48), (4, 48, 48), 4),
}
_RUN_EVERYWHERE = {"custom_white_list": RUN_IN_BFLOAT16, "custom_black_list": NEED_FLOAT32}
for _name in ("bert", "gpt"):
    _plain = MODELS[_name]
    MODELS[f"{_name}_bfloat16"] = replace(
        _plain, make=lambda m=_plain: HalfPrecision(m.make(), **_RUN_EVERYWHERE), is_half=True
    )
    MODELS[f"{_name}_amp"] = replace(_plain, make=lambda m=_plain: HalfPrecision(m.make()), is_half=True)


@functools.cache
def runs_half_products() -> bool:
    """Does this machine multiply in bfloat16? A program is run; on a CPU without AVX-512 it ends with Paddle's error.

    Paddle's own answer, ``is_bfloat16_supported``, says nothing of what oneDNN was told to use.
    """
    was_dynamic = paddle.in_dynamic_mode()
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        half = paddle.ones([16, 32]).astype("bfloat16")
        product = (half @ half.t()).astype("float32")
    try:
        paddle.static.Executor().run(main, fetch_list=[product])
    except RuntimeError:
        return False
    finally:
        if was_dynamic:
            paddle.disable_static()
    return True


def runs_here(name: str) -> bool:
    """Does this machine run a model?"""
    return not name.endswith("_amp") or runs_half_products()


def loss_of(output: Any, labels: Any) -> Any:
    """The mean cross-entropy over samples, words or pixels, in float32."""
    return F.cross_entropy(output.astype("float32"), labels)
