"""The models of JAX's zoo, small enough for a laptop's processor, written as their libraries' users write them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.jax.subject import JaxModel, Wrap

Loss = Callable[..., Any]


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal draws, the same ones each time."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def gradient_of(make_loss: Callable[[Wrap], Loss], *args: Any) -> JaxModel:
    """The zoo's model of a loss: ``make_loss`` takes what goes around each block."""
    return JaxModel(lambda wrap: jax.value_and_grad(make_loss(wrap)), args)


# Recurrences.


def recurrence(gates: int, cell: Loss, layers: int = 2, steps: int = 256, batch: int = 32, width: int = 64) -> JaxModel:
    """Layers of a recurrent cell over time; a cell carries one state, or two where it has four gates."""
    params = [
        (normal(2 * n, width, gates * width, scale=0.1), normal(2 * n + 1, width, gates * width, scale=0.1))
        for n in range(layers)
    ]

    def make_loss(wrap: Wrap) -> Loss:
        def loss(params: Any, xs: Any) -> Any:
            for own in params:
                each = wrap(functools.partial(cell, own))
                start = jnp.zeros((batch, width))
                _, xs = lax.scan(each, start if gates == 3 else (start, start), xs)
            return jnp.mean(xs**2)

        return loss

    return gradient_of(make_loss, params, normal(50, steps, batch, width))


def gru_cell(own: Any, h: Any, x: Any) -> Any:
    """One step of a gated recurrent unit."""
    of_input, of_state = jnp.split(x @ own[0], 3, -1), jnp.split(h @ own[1], 3, -1)
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    h = (1 - update) * jnp.tanh(of_input[2] + reset * of_state[2]) + update * h
    return h, h


def lstm_cell(own: Any, state: Any, x: Any) -> Any:
    """One step of a long short-term memory."""
    h, c = state
    i, f, g, o = jnp.split(x @ own[0] + h @ own[1], 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


# Decoders.


def rms_norm(x: Any, gain: Any) -> Any:
    """Root mean square normalisation."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def rotated(x: Any) -> Any:
    """Rotary positions over (batch, length, heads, width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(x: Any, p: Any, heads: int, groups: int, attend: Loss) -> Any:
    """Causal attention with grouped heads; ``attend`` takes queries, keys and values."""
    batch, length, width = x.shape
    own = width // heads
    q = rotated((x @ p["q"]).reshape(batch, length, heads, own))
    k = rotated((x @ p["k"]).reshape(batch, length, groups, own))
    v = (x @ p["v"]).reshape(batch, length, groups, own)
    k, v = (jnp.repeat(part, heads // groups, 2) for part in (k, v))
    return attend(q, k, v).reshape(batch, length, width) @ p["o"]


def attend_at_once(q: Any, k: Any, v: Any) -> Any:
    """All queries at once."""
    length = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def attend_in_chunks(size: int, wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    """So many queries at a time, in a loop: with ``jax.checkpoint`` around its body, attention without its matrix."""
    batch, length, heads, own = q.shape

    def chunk(_: Any, at: Any) -> Any:
        place, queries = at
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, k) * own**-0.5
        is_past = (place * size + jnp.arange(size))[:, None] >= jnp.arange(length)
        scores = jnp.where(is_past, scores, -1e9)
        return None, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    queries = q.reshape(batch, -1, size, heads, own).swapaxes(0, 1)
    _, out = lax.scan(wrap(chunk), None, (jnp.arange(len(queries)), queries))
    return out.swapaxes(0, 1).reshape(q.shape)


def swiglu(x: Any, p: Any) -> Any:
    """The gated feed-forward part."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def mixture(x: Any, p: Any) -> Any:
    """Experts by one-hot routing: each token goes to the expert of its largest score."""
    scores = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(scores.argmax(-1), scores.shape[-1]) * scores
    hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x, p["experts_up"]))
    return jnp.einsum("blef,efd,ble->bld", hidden, p["experts_down"], chosen)


def decoder(
    *,
    is_scanned: bool = False,
    chunk: int = 0,
    experts: int = 0,
    layers: int = 6,
    width: int = 128,
    length: int = 128,
    batch: int = 8,
) -> JaxModel:
    """RMSNorm, rotary positions, grouped heads, SwiGLU or experts, tied embeddings; attention in chunks, or at once."""
    heads, groups, words, wide = 4, 2, 512, 4 * width
    shapes = {"q": (width, width), "k": (width, width // 2), "v": (width, width // 2), "o": (width, width)}
    if experts:
        shapes |= {"router": (width, experts)}
        shapes |= {"experts_up": (experts, width, width), "experts_down": (experts, width, width)}
    else:
        shapes |= {"gate": (width, wide), "up": (width, wide), "down": (wide, width)}
    blocks = [
        {name: normal(20 * n + k, *shape, scale=0.05) for k, (name, shape) in enumerate(shapes.items())}
        | {"norm_1": jnp.ones(width), "norm_2": jnp.ones(width)}
        for n in range(layers)
    ]
    whole: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if is_scanned else blocks
    params = {"words": normal(999, words, width, scale=0.05), "blocks": whole, "norm": jnp.ones(width)}

    def make_loss(wrap: Wrap) -> Loss:
        attend = functools.partial(attend_in_chunks, chunk, wrap) if chunk else attend_at_once

        def block(x: Any, p: Any) -> Any:
            x = x + attention(rms_norm(x, p["norm_1"]), p, heads, groups, attend)
            return x + (mixture if experts else swiglu)(rms_norm(x, p["norm_2"]), p)

        own = wrap(block)

        def loss(params: Any, tokens: Any) -> Any:
            x = params["words"][tokens]
            if is_scanned:
                x, _ = lax.scan(lambda x, p: (own(x, p), None), x, params["blocks"])
            else:
                for p in params["blocks"]:
                    x = own(x, p)
            logits = rms_norm(x, params["norm"]) @ params["words"].T
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

        return loss

    tokens = jnp.asarray(np.random.default_rng(3).integers(0, words, (batch, length)))
    return gradient_of(make_loss, params, tokens)


def mamba(layers: int = 3, width: int = 64, state: int = 8, length: int = 128, batch: int = 4) -> JaxModel:
    """A selective state space model, its recurrence by ``lax.associative_scan``."""
    shapes = {
        "in": (width, 2 * width),
        "step": (width, width),
        "b": (width, state),
        "c": (width, state),
        "decay": (width, state),
        "out": (width, width),
    }
    params = [
        {name: normal(20 * n + k, *shape, scale=0.1) for k, (name, shape) in enumerate(shapes.items())}
        for n in range(layers)
    ]

    def block(x: Any, p: Any) -> Any:
        h, gate = jnp.split(x @ p["in"], 2, -1)
        step = jax.nn.softplus(h @ p["step"])
        decay = jnp.exp(step[..., None] * -jnp.exp(p["decay"]))
        drive = step[..., None] * (h @ p["b"])[..., None, :] * h[..., None]
        combine: Any = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])  # noqa: E731
        _, states = lax.associative_scan(combine, (decay, drive), axis=1)
        return x + (jnp.einsum("blds,bls->bld", states, h @ p["c"]) * jax.nn.silu(gate)) @ p["out"]

    return gradient_of(chain_of(block), params, normal(1, batch, length, width))


def chain_of(block: Callable[[Any, Any], Any]) -> Callable[[Wrap], Loss]:
    """A loss over blocks that follow one another."""

    def make_loss(wrap: Wrap) -> Loss:
        own = wrap(block)

        def loss(params: Any, x: Any) -> Any:
            for p in params:
                x = own(x, p)
            return jnp.mean(x**2)

        return loss

    return make_loss


def graph_network(layers: int = 4, width: int = 32, nodes: int = 512, edges: int = 4096) -> JaxModel:
    """Messages along edges, summed at the nodes."""
    random = np.random.default_rng(0)
    source, target = (jnp.asarray(random.integers(0, nodes, edges)) for _ in range(2))
    params = [
        {
            "one": normal(9 * n, 2 * width, 2 * width, scale=0.1),
            "two": normal(9 * n + 1, 2 * width, width, scale=0.1),
            "update": normal(9 * n + 2, 2 * width, width, scale=0.1),
        }
        for n in range(layers)
    ]

    def block(x: Any, p: Any) -> Any:
        ends = jnp.concatenate([x[source], x[target]], -1)
        messages = jax.nn.relu(jax.nn.silu(ends @ p["one"]) @ p["two"])
        summed = jax.ops.segment_sum(messages, target, nodes)
        return x + jnp.tanh(jnp.concatenate([x, summed], -1) @ p["update"])

    return gradient_of(chain_of(block), params, normal(1, nodes, width))


def mixer(layers: int = 4, width: int = 64, patches: int = 64, batch: int = 32) -> JaxModel:
    """An MLP-mixer of Equinox modules."""
    import equinox as eqx

    class Block(eqx.Module):  # type: ignore[misc]
        norm_1: Any
        norm_2: Any
        of_patches: Any
        of_channels: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 2)
            self.norm_1, self.norm_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
            self.of_patches = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=keys[0])
            self.of_channels = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

        def __call__(self, x: Any) -> Any:
            x = x + jax.vmap(self.of_patches, 1, 1)(jax.vmap(self.norm_1)(x))
            return x + jax.vmap(self.of_channels)(jax.vmap(self.norm_2)(x))

    blocks = [Block(key) for key in jax.random.split(jax.random.key(0), layers)]
    params, rest = eqx.partition(blocks, eqx.is_inexact_array)

    def make_loss(wrap: Wrap) -> Loss:
        def loss(params: Any, x: Any) -> Any:
            for own, other in zip(params, rest, strict=True):
                x = wrap(lambda x, own, other=other: jax.vmap(eqx.combine(own, other))(x))(x, own)
            return jnp.mean(x**2)

        return loss

    return gradient_of(make_loss, params, normal(1, batch, patches, width))


def resnet(blocks: int = 6, channels: int = 16, size: int = 32, batch: int = 16) -> JaxModel:
    """Residual blocks of Flax Linen whose batch statistics change with each step."""
    from flax import linen as nn

    class Block(nn.Module):  # type: ignore[misc]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(channels, (3, 3), use_bias=False)(x)))
            y = nn.BatchNorm(use_running_average=False)(nn.Conv(channels, (3, 3), use_bias=False)(y))
            return nn.relu(x + y)

    class Model(nn.Module):  # type: ignore[misc]
        wraps: bool
        policy: Any = None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            own = nn.remat(Block, policy=self.policy) if self.wraps else Block
            x = nn.Conv(channels, (3, 3))(x)
            for number in range(blocks):
                x = own(name=f"block_{number}")(x)
            return nn.Dense(10)(x.mean((1, 2)))

    images = normal(1, batch, size, size, 3)
    labels = jnp.asarray(np.random.default_rng(2).integers(0, 10, batch))
    variables = Model(False).init(jax.random.key(0), images)

    def make(wrap: Wrap) -> Loss:
        wraps = wrap(jnp.sin) is not jnp.sin
        policy = getattr(wrap, "keywords", {}).get("policy")
        model = Model(wraps, policy)

        def loss(params: Any, statistics: Any, images: Any, labels: Any) -> Any:
            logits, changed = model.apply(
                {"params": params, "batch_stats": statistics}, images, mutable=["batch_stats"]
            )
            own = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            return -own.mean(), changed["batch_stats"]

        return jax.value_and_grad(loss, has_aux=True)

    return JaxModel(make, (variables["params"], variables["batch_stats"], images, labels))


def vision_transformer(layers: int = 4, width: int = 64, patches: int = 64, batch: int = 16) -> JaxModel:
    """A vision transformer of Flax NNX with dropout."""
    from flax import nnx

    class Block(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, width, rngs=rngs, decode=False)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any, key: Any) -> Any:
            x = x + self.attention(self.norm_1(x))
            hidden = nnx.gelu(self.up(self.norm_2(x)))
            kept = jax.random.bernoulli(key, 0.9, hidden.shape)
            return x + self.down(jnp.where(kept, hidden / 0.9, 0.0))

    split = [nnx.split(Block(nnx.Rngs(number))) for number in range(layers)]
    structures, params = [one for one, _ in split], [own for _, own in split]

    def make_loss(wrap: Wrap) -> Loss:
        def loss(params: Any, x: Any, key: Any) -> Any:
            for structure, own, each in zip(structures, params, jax.random.split(key, layers), strict=True):
                x = wrap(lambda own, x, each, structure=structure: nnx.merge(structure, own)(x, each))(own, x, each)
            return jnp.mean(x**2)

        return loss

    return gradient_of(make_loss, params, normal(1, batch, patches, width), jax.random.key(0, impl="rbg"))


def unet(channels: int = 16, size: int = 32, batch: int = 8) -> JaxModel:
    """Down and up again, with attention where the picture is smallest and shortcuts across."""
    widths = (channels, 2 * channels, 4 * channels)

    def kernel(seed: int, given: int, made: int) -> Any:
        return normal(seed, 3, 3, given, made, scale=0.2 * given**-0.5)

    params = {
        "down": [
            (kernel(n, given, made), kernel(9 + n, made, made))
            for n, (given, made) in enumerate(zip((3, *widths), widths, strict=False))
        ],
        "attention": normal(50, widths[-1], 3 * widths[-1], scale=0.1),
        "up": [
            (kernel(20 + n, widths[2 - n] + widths[1 - n], widths[1 - n]), kernel(30 + n, widths[1 - n], widths[1 - n]))
            for n in range(2)
        ],
        "last": kernel(40, channels, 3),
    }

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(x: Any, own: Any) -> Any:
        for w in own:
            x = convolved(x, w)
            x = jax.nn.silu((x - x.mean((1, 2), keepdims=True)) * lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5))
        return x

    def attend(x: Any, w: Any) -> Any:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = jnp.split(flat @ w, 3, -1)
        return x + (jax.nn.softmax(q @ k.swapaxes(1, 2) * x.shape[-1] ** -0.5) @ v).reshape(x.shape)

    def make_loss(wrap: Wrap) -> Loss:
        own, attending = wrap(block), wrap(attend)

        def loss(params: Any, x: Any) -> Any:
            wanted, left = x, []
            for number, w in enumerate(params["down"]):
                x = own(x, w)
                if number < 2:
                    left.append(x)
                    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = attending(x, params["attention"])
            for w in params["up"]:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
                x = own(jnp.concatenate([x, left.pop()], -1), w)
            return jnp.mean((convolved(x, params["last"]) - wanted) ** 2)

        return loss

    return gradient_of(make_loss, params, normal(1, batch, size, size, 3))


# Derivatives of other kinds.


def layers_of(count: int, width: int, given: int, made: int) -> list[Any]:
    """Weights of a multilayer perceptron."""
    widths = (given, *([width] * count), made)
    return [normal(n, a, b, scale=a**-0.5) for n, (a, b) in enumerate(itertools.pairwise(widths))]


def perceptron(wrap: Wrap) -> Loss:
    """A perceptron with a tanh behind each layer but the last."""
    layer = wrap(lambda x, w: jnp.tanh(x @ w))

    def run(params: Any, x: Any) -> Any:
        for w in params[:-1]:
            x = layer(x, w)
        return x @ params[-1]

    return run


def physics_informed(points: int = 4096) -> JaxModel:
    """A network that solves u'' = -u: second derivatives inside of the loss."""

    def make_loss(wrap: Wrap) -> Loss:
        network = perceptron(wrap)

        def loss(params: Any, t: Any) -> Any:
            u = lambda one: network(params, one[None])[0]  # noqa: E731
            second = jax.vmap(jax.grad(jax.grad(u)))(t)
            return jnp.mean((second + jax.vmap(u)(t)) ** 2)

        return loss

    return gradient_of(make_loss, layers_of(4, 64, 1, 1), normal(1, points))


def neural_ode(steps: int = 64, width: int = 64, batch: int = 256) -> JaxModel:
    """Four stages of Runge and Kutta for each step of a loop."""

    def make_loss(wrap: Wrap) -> Loss:
        def step(params: Any, y: Any) -> Any:
            rate = functools.partial(perceptron(lambda layer: layer), params)
            a = rate(y)
            b = rate(y + 0.05 * a)
            c = rate(y + 0.05 * b)
            d = rate(y + 0.1 * c)
            return y + 0.1 / 6 * (a + 2 * b + 2 * c + d)

        own = wrap(step)

        def loss(params: Any, y: Any) -> Any:
            y, _ = lax.scan(lambda y, _: (own(params, y), None), y, None, length=steps)
            return jnp.mean(y**2)

        return loss

    return gradient_of(make_loss, layers_of(2, width, 8, 8), normal(1, batch, 8))


def gradient_penalty(batch: int = 1024, width: int = 128) -> JaxModel:
    """A critic whose slope is held near 1, as in WGAN-GP."""

    def make_loss(wrap: Wrap) -> Loss:
        critic = perceptron(wrap)

        def loss(params: Any, x: Any) -> Any:
            slope = jax.vmap(jax.grad(lambda one: critic(params, one)[0]))(x)
            penalty = (jnp.sqrt((slope**2).sum(-1) + 1e-12) - 1) ** 2
            return critic(params, x).mean() + 10 * penalty.mean()

        return loss

    return gradient_of(make_loss, layers_of(6, width, 32, 1), normal(1, batch, 32))


def per_example_gradients(batch: int = 64, width: int = 64) -> JaxModel:
    """The gradient of each example, clipped, then summed, as in private training."""

    def make(wrap: Wrap) -> Loss:
        network = perceptron(wrap)

        def step(params: Any, x: Any, y: Any) -> Any:
            loss = lambda p, one, wanted: jnp.mean((network(p, one) - wanted) ** 2)  # noqa: E731
            own = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
            norms = jnp.sqrt(sum((g**2).sum((-2, -1)) for g in own) + 1e-12)
            scale = jnp.minimum(1.0, 1.0 / norms)
            return [jnp.einsum("b,bij->ij", scale, g) for g in own]

        return step

    return JaxModel(make, (layers_of(6, width, 32, 4), normal(1, batch, 16, 32), normal(2, batch, 16, 4)))


def fixed_point(layers: int = 4, width: int = 64, batch: int = 512) -> JaxModel:
    """Layers whose outputs are fixed points, found by a ``while_loop``, with the implicit derivative."""

    @jax.custom_vjp
    def solved(w: Any, x: Any) -> Any:
        return lax.while_loop(
            lambda state: (state[1] < 30) & (jnp.abs(state[0] - state[2]).max() > 1e-5),
            lambda state: (jnp.tanh(0.5 * state[0] @ w + x), state[1] + 1, state[0]),
            (jnp.tanh(x), 0, jnp.zeros_like(x)),
        )[0]

    def forward(w: Any, x: Any) -> Any:
        z = solved(w, x)
        return z, (w, x, z)

    def backward(kept: Any, g: Any) -> Any:
        w, x, z = kept
        _, pull = jax.vjp(lambda w, x, z: jnp.tanh(0.5 * z @ w + x), w, x, z)
        u = lax.fori_loop(0, 20, lambda _, u: g + pull(u)[2], g)
        return pull(u)[:2]

    solved.defvjp(forward, backward)

    def block(x: Any, p: Any) -> Any:
        return jax.nn.gelu(solved(p["z"], x) @ p["out"])

    params = [
        {"z": normal(2 * n, width, width, scale=0.3 * width**-0.5), "out": normal(2 * n + 1, width, width, scale=0.1)}
        for n in range(layers)
    ]
    return gradient_of(chain_of(block), params, normal(1, batch, width))


def custom_derivative(layers: int = 8, width: int = 64, batch: int = 1024) -> JaxModel:
    """Layers with a derivative of their own: rounding that lets gradients pass."""

    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.round(x * 16) / 16

    rounded.defvjp(lambda x: (rounded(x), x), lambda x, g: (g * (jnp.abs(x) < 4),))

    def block(x: Any, p: Any) -> Any:
        return x + jnp.tanh(rounded(jax.nn.gelu(x @ p["up"])) @ p["down"])

    params = [
        {"up": normal(2 * n, width, 4 * width, scale=0.1), "down": normal(2 * n + 1, 4 * width, width, scale=0.1)}
        for n in range(layers)
    ]
    return gradient_of(chain_of(block), params, normal(1, batch, width))


def half_precision(layers: int = 6, width: int = 128, batch: int = 1024) -> JaxModel:
    """bfloat16 with float32 master weights, and donated AdamW steps of optax."""
    import optax

    optimizer = optax.adamw(1e-3)
    master = [
        {"up": normal(2 * n, width, 2 * width, scale=0.1), "down": normal(2 * n + 1, 2 * width, width, scale=0.1)}
        for n in range(layers)
    ]

    def block(x: Any, p: Any) -> Any:
        return x + jnp.tanh(jax.nn.silu(x @ p["up"]) @ p["down"])

    def make(wrap: Wrap) -> Loss:
        loss_of = chain_of(block)(wrap)

        def step(master: Any, state: Any, x: Any) -> Any:
            def loss(master: Any) -> Any:
                half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
                return loss_of(half, x).astype(jnp.float32)

            value, gradients = jax.value_and_grad(loss)(master)
            updates, state = optimizer.update(gradients, state, master)
            return optax.apply_updates(master, updates), state, value

        return step

    x = normal(1, batch, width).astype(jnp.bfloat16)
    return JaxModel(make, (master, optimizer.init(master), x), donate_argnums=(0, 1))


MODELS: Final[Models] = {
    "gru": functools.partial(recurrence, 3, gru_cell),
    "lstm": functools.partial(recurrence, 4, lstm_cell),
    "decoder": decoder,
    "decoder_scanned": functools.partial(decoder, is_scanned=True),
    "decoder_nested": functools.partial(decoder, is_scanned=True, chunk=64, length=512, batch=4),
    "experts": functools.partial(decoder, experts=4, layers=4),
    "mamba": mamba,
    "graph_network": graph_network,
    "mixer_equinox": mixer,
    "resnet_linen": resnet,
    "vit_nnx": vision_transformer,
    "unet": unet,
    "pinn": physics_informed,
    "neural_ode": neural_ode,
    "gradient_penalty": gradient_penalty,
    "per_example": per_example_gradients,
    "fixed_point": fixed_point,
    "custom_vjp": custom_derivative,
    "bfloat16_adamw": half_precision,
}
