"""Networks for generative models, conditioned on a time and a label: an MLP, and a diffusion transformer.

`DiT` has the architecture of "Scalable Diffusion Models with Transformers" (Peebles and Xie, 2023), with adaLN-Zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast, Problem
from jax_trainer.models.attention import Attention, head_problems
from jax_trainer.models.layers import (
    ACTIVATIONS,
    INIT_STD,
    ActFn,
    Images,
    Perceptron,
    Rate,
    Size,
    flat,
    flat_size,
    image_shape,
    precise,
    through,
    vectors,
)

NO_LABEL = -1  # the label of an example without one, or whose label was dropped

WAVES = 256
TIME_SCALE = 1000.0  # times are from 0 to 1, the sinusoids are for steps from 0 to 1000
LONGEST_WAVE = 10_000.0
Times = Float[Array, "batch"]
Labels = Int[Array, "batch"] | None
Known = Float[Array, "batch width"]  # of the time and the label
Patches = Float[Array, "batch patches width"]


class Conditioning(nnx.Module):
    """The sum of time and label embeddings: [batch], [batch] or None → [batch, width].

    Sinusoids of the time go through two linear layers. Each label has a vector, and `NO_LABEL` has the last one.
    """

    def __init__(self, num_classes: int, width: int, *, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(INIT_STD)
        self.num_classes = num_classes
        self.hidden = nnx.Linear(WAVES, width, kernel_init=small, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=small, rngs=rngs)
        self.labels = vectors(num_classes + 1, width, rngs=rngs) if num_classes else None

    def __call__(self, t: Times, condition: Labels = None) -> Known:
        """[batch], [batch] or None → [batch, width]; an invalid label gives NaN."""
        if t.ndim != 1:
            raise ValueError(f"The time must have the shape [batch], got {t.shape}.")
        if condition is not None and self.labels is None:
            raise ValueError(
                f"This network has `num_classes: 0`, but got a condition of shape {condition.shape}. "
                "Set `num_classes`, or call it without a condition."
            )
        if condition is not None and (condition.shape != t.shape or not jnp.issubdtype(condition.dtype, jnp.integer)):
            raise ValueError(
                f"The condition must be an integer label for each of {len(t)} examples, "
                f"got {condition.dtype} of shape {condition.shape}."
            )
        # in float32: bfloat16 would round the angle by more than 2π
        waves = sinusoids(TIME_SCALE * t.astype(jnp.promote_types(t.dtype, jnp.float32)), WAVES)
        known = self.out(jax.nn.silu(self.hidden(waves.astype(self.hidden.kernel.dtype))))
        if self.labels is None:
            return known
        labels = jnp.full(len(t), NO_LABEL) if condition is None else condition.astype(jnp.int32)
        is_label = (labels >= NO_LABEL) & (labels < self.num_classes)
        row, outside = jnp.where(labels == NO_LABEL, self.num_classes, labels), self.num_classes + 1
        return known + jnp.take(self.labels[...], jnp.where(is_label, row, outside), axis=0)


def sinusoids(positions: Float[Array, "*shape"], count: int) -> Float[Array, "*shape count"]:
    """Sinusoidal embeddings: cosines and sines of `count` / 2 frequencies, from 1 downwards."""
    steps = jnp.arange(count // 2, dtype=positions.dtype) / (count // 2)
    angles = positions[..., None] * jnp.exp(-math.log(LONGEST_WAVE) * steps)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


@dataclass
class ConditionalMLPConfig(BaseModelConfig):
    """Configuration of `ConditionalMLP`.

    Args:
        hidden: width of each hidden layer.
        num_classes: number of labels; 0: no label conditioning.
        act_fn: activation after each hidden layer.
    """

    hidden: tuple[Size, ...] = (128, 128, 128)
    num_classes: Annotated[int, AtLeast(0)] = 0
    act_fn: ActFn = "silu"

    def problems(self) -> Iterator[Problem]:
        """Reports a network without hidden layers, in which time and label are added."""
        if not self.hidden:
            yield "hidden", "`hidden` must have at least one layer: time and label are added there."


@register
class ConditionalMLP(BaseModelNNX):
    """An MLP conditioned on time and label: x [batch, …], t [batch], labels [batch] or None → like x.

    Time and label are added in every hidden layer. The output layer is initialized to zero.
    """

    config: ConditionalMLPConfig

    def __init__(self, config: ConditionalMLPConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        size, known = flat_size(exmp_input), config.hidden[0]
        self.config = config
        self.conditioning = Conditioning(config.num_classes, known, rngs=rngs)
        self.layers, self.known = nnx.List(), nnx.List()  # of the input, and of the condition
        for inputs, outputs in pairwise((size, *config.hidden)):
            self.layers.append(nnx.Linear(inputs, outputs, rngs=rngs))
            self.known.append(nnx.Linear(known, outputs, use_bias=False, rngs=rngs))
        self.out = nnx.Linear(config.hidden[-1], size, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "batch ..."], t: Times, condition: Labels = None) -> Float[Array, "batch ..."]:
        """[batch, …], [batch], [batch] or None → like x, in float32 at least."""
        act_fn = ACTIVATIONS[self.config.act_fn]
        known = act_fn(self.conditioning(t, condition))
        hidden = flat(x).astype(known.dtype)
        for layer, known_layer in zip(self.layers, self.known, strict=True):
            hidden = act_fn(layer(hidden) + known_layer(known))
        return precise(self.out, hidden).reshape(x.shape)


Published = Literal["small", "base", "large", "xl"]

SIZES: dict[Published, tuple[int, int, int]] = {  # layers, heads and width
    "small": (12, 6, 384),
    "base": (12, 12, 768),
    "large": (24, 16, 1024),
    "xl": (28, 16, 1152),
}


@dataclass
class DiTConfig(BaseModelConfig):
    """Configuration of `DiT`.

    Args:
        size: published size, the default of `layers`, `heads` and `width`.
        patch: patch size, in pixels.
        num_classes: number of labels; 0: no label conditioning.
        out_channels: number of output channels; null: that of the input.
        layers: number of transformer blocks; null: that of `size`.
        heads: number of attention heads; null: that of `size`.
        width: embedding dimension; null: that of `size`.
        dropout: dropout rate of the residual branches.
        remat: rematerialize blocks in the backward pass: less memory, a third more compute.
    """

    size: Published = "small"
    patch: Size = 2
    num_classes: Annotated[int, AtLeast(0)] = 10
    out_channels: Size | None = None
    layers: Size | None = None
    heads: Size | None = None
    width: Size | None = None
    dropout: Rate = 0.0
    remat: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Layers, heads and width: the published ones of `size`, where they are not set."""
        layers, heads, width = SIZES[self.size]
        return self.layers or layers, self.heads or heads, self.width or width

    def problems(self) -> Iterator[Problem]:
        """Reports a width that does not divide evenly into heads, or into sinusoids of two coordinates."""
        _, heads, width = self.sizes
        yield from head_problems(heads, width)
        if width % 4:
            yield "width", f"`width` must be a multiple of 4 (sines and cosines of rows and columns), got {width}."


class DiTBlock(nnx.Module):
    """A transformer block with adaLN-Zero: [batch, patches, width] → [batch, patches, width]."""

    def __init__(self, heads: int, width: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.modulation = modulation(width, 6, rngs=rngs)
        self.norm = plain_norm(width, rngs=rngs)
        layer = partial(nnx.Linear, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        joined, out = layer(width, 3 * width), layer(width, width)
        self.attention = Attention([joined], size=width // heads, out=out, is_causal=False)
        self.perceptron = Perceptron("gelu", hidden=layer(width, 4 * width), out=layer(4 * width, width))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Patches, known: Known) -> Patches:
        """[batch, patches, width], [batch, width] → [batch, patches, width]."""
        shift, scale, weight, later_shift, later_scale, later_weight = modulated(self.modulation, known)
        x = x + weight * self.dropout(self.attention(self.norm(x) * (1 + scale) + shift))
        return x + later_weight * self.dropout(self.perceptron(self.norm(x) * (1 + later_scale) + later_shift))


def modulation(width: int, count: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """The layer of an adaLN-Zero modulation, which is initialized to zero."""
    return nnx.Linear(width, count * width, kernel_init=nnx.initializers.zeros, rngs=rngs)


def modulated(layer: nnx.Linear, known: Known) -> list[Float[Array, "batch 1 width"]]:
    """Shifts, scales and weights by time and label: [batch, width] → several [batch, 1, width]."""
    return jnp.split(layer(jax.nn.silu(known))[:, None], layer.out_features // layer.in_features, axis=-1)


@register
class DiT(BaseModelNNX):
    """A diffusion transformer: images [batch, h, w, c], t, labels → [batch, h, w, channels].

    Height and width must be multiples of the patch size, and may differ from those of the example. The output layer is
    initialized to zero.
    """

    config: DiTConfig

    def __init__(self, config: DiTConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        (layers, heads, width), pixels = config.sizes, config.patch**2
        self.config = config
        _, _, self.channels = image_shape("DiT", exmp_input.shape, config.patch)
        xavier = nnx.initializers.xavier_uniform()
        self.patches = nnx.Linear(pixels * self.channels, width, kernel_init=xavier, rngs=rngs)
        self.conditioning = Conditioning(config.num_classes, width, rngs=rngs)
        self.blocks = nnx.List(DiTBlock(heads, width, config.dropout, rngs=rngs) for _ in range(layers))
        self.modulation = modulation(width, 2, rngs=rngs)
        self.norm = plain_norm(width, rngs=rngs)
        outputs = pixels * (config.out_channels or self.channels)
        self.out = nnx.Linear(width, outputs, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: Images, t: Times, condition: Labels = None) -> Images:
        """[batch, h, w, c], [batch], [batch] or None → [batch, h, w, out_channels], in float32 at least."""
        patch = self.config.patch
        height, width, channels = image_shape("DiT", x.shape, patch)
        if channels != self.channels:
            raise ValueError(f"This DiT was built for images of {self.channels} channels, got shape {x.shape}.")
        rows, columns = height // patch, width // patch
        known = self.conditioning(t, condition)
        tokens = self.patches(patchify(x, patch).astype(known.dtype))
        tokens = tokens + positions(rows, columns, tokens.shape[-1]).astype(tokens.dtype)
        tokens = through(self.blocks, tokens, known, remat=self.config.remat)
        shift, scale = modulated(self.modulation, known)
        return unpatchify(precise(self.out, self.norm(tokens) * (1 + scale) + shift), patch, rows, columns)


def patchify(images: Images, patch: int) -> Float[Array, "batch patches pixels"]:
    """Splits images into patches, in row-major order: [batch, h, w, c] → [batch, patches, p·p·c]."""
    batch, height, width, channels = images.shape
    cut = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return cut.swapaxes(2, 3).reshape(batch, -1, patch * patch * channels)


def unpatchify(patches: Float[Array, "batch patches pixels"], patch: int, rows: int, columns: int) -> Images:
    """Inverse of `patchify` for `rows` × `columns` patches: [batch, patches, p·p·c] → [batch, h, w, c]."""
    cut = patches.reshape(patches.shape[0], rows, columns, patch, patch, -1)
    return cut.swapaxes(2, 3).reshape(patches.shape[0], rows * patch, columns * patch, cut.shape[-1])


def positions(rows: int, columns: int, width: int) -> Float[Array, "patches width"]:
    """Sinusoidal position embeddings of patches: of the row in the first half, of the column in the second."""
    embed = lambda count: sinusoids(jnp.arange(count, dtype=jnp.float32), width // 2)
    down = jnp.broadcast_to(embed(rows)[:, None], (rows, columns, width // 2))
    across = jnp.broadcast_to(embed(columns)[None], (rows, columns, width // 2))
    return jnp.concatenate([down, across], axis=-1).reshape(rows * columns, width)


def plain_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm without parameters: time and label scale and shift instead."""
    return nnx.LayerNorm(width, use_bias=False, use_scale=False, rngs=rngs)
