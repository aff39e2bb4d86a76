"""A diffusion transformer, conditioned on the time and a label, for generative models of images.

The architecture of "Scalable Diffusion Models with Transformers" (Peebles and Xie, 2023), with adaLN-Zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast, Problem
from jax_trainer.models.attention import attend, head_problems, split_heads
from jax_trainer.models.conditioning import Conditioning, sinusoids
from jax_trainer.models.layers import Images, Perceptron, Rate, Size, image_shape, precise, through

Published = Literal["small", "base", "large", "xl"]
Patches = Float[Array, "batch patches width"]


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


class Attention(nnx.Module):
    """Self-attention: [batch, patches, width] → [batch, patches, width]."""

    def __init__(self, heads: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.into_heads = linear(width, 3 * width, rngs=rngs)
        self.out = linear(width, width, rngs=rngs)

    def __call__(self, x: Patches) -> Patches:
        """[batch, patches, width] → [batch, patches, width]."""
        return self.out(attend(*split_heads(self.into_heads(x), self.heads)).reshape(x.shape))


class Modulation(nnx.Module):
    """The adaLN-Zero modulation of a block by time and label: [batch, width] → `count` times [batch, 1, width].

    It is initialized to zero.
    """

    def __init__(self, width: int, count: int, *, rngs: nnx.Rngs) -> None:
        self.count = count
        self.linear = nnx.Linear(width, count * width, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, known: Float[Array, "batch width"]) -> list[Float[Array, "batch 1 width"]]:
        """[batch, width] → `count` times [batch, 1, width]."""
        return jnp.split(self.linear(jax.nn.silu(known))[:, None], self.count, axis=-1)


class Block(nnx.Module):
    """A transformer block with adaLN-Zero: [batch, patches, width] → [batch, patches, width]."""

    def __init__(self, heads: int, width: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        self.modulation = Modulation(width, 6, rngs=rngs)
        self.norm = plain_norm(width, rngs=rngs)
        self.attention = Attention(heads, width, rngs=rngs)
        self.perceptron = Perceptron(linear(width, 4 * width, rngs=rngs), linear(4 * width, width, rngs=rngs), "gelu")
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Patches, known: Float[Array, "batch width"]) -> Patches:
        """[batch, patches, width], [batch, width] → [batch, patches, width]."""
        shift, scale, weight, later_shift, later_scale, later_weight = self.modulation(known)
        x = x + weight * self.dropout(self.attention(self.norm(x) * (1 + scale) + shift))
        return x + later_weight * self.dropout(self.perceptron(self.norm(x) * (1 + later_scale) + later_shift))


class Head(nnx.Module):
    """The output layer: [batch, patches, width] → [batch, patches, pixels × channels]."""

    def __init__(self, width: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.modulation = Modulation(width, 2, rngs=rngs)
        self.norm = plain_norm(width, rngs=rngs)
        self.out = nnx.Linear(width, outputs, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: Patches, known: Float[Array, "batch width"]) -> Float[Array, "batch patches outputs"]:
        """[batch, patches, width], [batch, width] → [batch, patches, outputs], in float32 at least."""
        shift, scale = self.modulation(known)
        return precise(self.out, self.norm(x) * (1 + scale) + shift)


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
        self.channels = _channels(config, exmp_input.shape)
        self.patches = linear(pixels * self.channels, width, rngs=rngs)
        self.conditioning = Conditioning(config.num_classes, width, rngs=rngs)
        self.blocks = nnx.List(Block(heads, width, config.dropout, rngs=rngs) for _ in range(layers))
        self.head = Head(width, pixels * (config.out_channels or self.channels), rngs=rngs)

    def __call__(self, x: Images, t: Float[Array, "batch"], condition: Int[Array, "batch"] | None = None) -> Images:
        """[batch, h, w, c], [batch], [batch] or None → [batch, h, w, out_channels], in float32 at least."""
        patch = self.config.patch
        if _channels(self.config, x.shape) != self.channels:
            raise ValueError(f"This DiT was built for images of {self.channels} channels, got shape {x.shape}.")
        rows, columns = x.shape[1] // patch, x.shape[2] // patch
        known = self.conditioning(t, condition)
        tokens = self.patches(patchify(x, patch).astype(known.dtype))
        tokens = tokens + positions(rows, columns, tokens.shape[-1]).astype(tokens.dtype)
        tokens = through(self.blocks, tokens, known, remat=self.config.remat)
        return unpatchify(self.head(tokens, known), patch, rows, columns)


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


def linear(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer with the Xavier initialization of the paper."""
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)


def plain_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm without parameters: time and label scale and shift instead."""
    return nnx.LayerNorm(width, use_bias=False, use_scale=False, rngs=rngs)


def _channels(config: DiTConfig, shape: tuple[int, ...]) -> int:
    """The number of channels of images of this shape; raises if they cannot be split into patches."""
    height, width, channels = image_shape("DiT", shape)
    if height % config.patch or width % config.patch:
        raise ValueError(
            f"Images of {height} × {width} pixels do not split into patches of {config.patch} × {config.patch}. "
            "Use a `patch` that divides both."
        )
    return channels
