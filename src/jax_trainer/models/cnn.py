"""A small convolutional network for images."""

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.interfaces import BaseModelConfig, BaseModelNNX
from jax_trainer.models.layers import ACTIVATIONS, ActFn, Hidden, batch_norm, flat
from jax_trainer.settings import AtLeast, Below


@dataclass
class CNNConfig(BaseModelConfig):
    """The sizes of a small convolutional network.

    Args:
        channels: how many channels each convolution makes.
        kernel: the side of every convolution's window, in pixels.
        pooling: after each convolution, the largest of so many × so many pixels is kept; 1 keeps all.
        hidden: the width of the layer before the last.
        num_classes: how many classes there are.
        act_fn: the activation after each convolution and in the hidden layer.
        dropout: the share of the hidden layer's units that a training step leaves out.
        batch_norm: normalise channels and hidden units over the batch, before their activation.
    """

    channels: tuple[Annotated[int, AtLeast(1)], ...] = (16, 32)
    kernel: Annotated[int, AtLeast(1)] = 3
    pooling: Annotated[int, AtLeast(1)] = 2
    hidden: Annotated[int, AtLeast(1)] = 128
    num_classes: Annotated[int, AtLeast(1)] = 10
    act_fn: ActFn = "gelu"
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    batch_norm: bool = True


class Convolution(nnx.Module):
    """Convolution, pooling, BatchNorm if wanted, activation: [batch, h, w, inputs] → [batch, h / p, w / p, outputs].

    Pixels that pooling drops are dropped first: normalising and activating them would cost the most of all.
    """

    def __init__(self, config: CNNConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(inputs, outputs, (config.kernel, config.kernel), rngs=rngs)
        self.pooling = config.pooling
        self.norm = batch_norm(outputs, config.batch_norm, rngs=rngs)
        self.act_fn = ACTIVATIONS[config.act_fn]

    def __call__(
        self, x: Float[Array, "batch height width inputs"]
    ) -> Float[Array, "batch pooled_height pooled_width outputs"]:
        """[batch, h, w, inputs] → [batch, h / p, w / p, outputs]."""
        return self.act_fn(self.norm(max_pool(self.conv(x), self.pooling)))


@register
class CNN(BaseModelNNX):
    """Convolutions with pooling, and two linear layers, on images: [batch, h, w, c] → [batch, num_classes]."""

    config: CNNConfig

    def __init__(self, config: CNNConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        height, width, depth = _pooled_shape(config, exmp_input.shape)
        sizes = (exmp_input.shape[-1], *config.channels)
        self.config = config
        self.convolutions = nnx.List(
            Convolution(config, inputs, outputs, rngs=rngs) for inputs, outputs in pairwise(sizes)
        )
        self.hidden = Hidden(
            *(height * width * depth, config.hidden),
            act_fn=config.act_fn,
            dropout=config.dropout,
            norm=config.batch_norm,
            rngs=rngs,
        )
        self.out = nnx.Linear(config.hidden, config.num_classes, rngs=rngs)

    def __call__(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes]."""
        x = images
        for convolution in self.convolutions:
            x = convolution(x)
        return self.out(self.hidden(flat(x)))


def max_pool(
    x: Float[Array, "batch height width channels"], size: int
) -> Float[Array, "batch pooled_height pooled_width channels"]:
    """The largest of every `size` × `size` pixels; those that are left over at the far edges are dropped.

    On the CPU three times as fast as a reduction over windows, whose gradient has to search for the place again.
    """
    for axis in (1, 2):
        whole = x.shape[axis] // size * size
        every = [jax.lax.slice_in_dim(x, first, whole, size, axis) for first in range(size)]
        x = reduce(jnp.maximum, every)
    return x


def _pooled_shape(config: CNNConfig, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """What the last convolution makes of one image."""
    if len(shape) != 4:
        raise ValueError(f"CNN takes images [batch, height, width, channels], got an input of shape {shape}.")
    shrink = config.pooling ** len(config.channels)
    height, width = shape[1] // shrink, shape[2] // shrink
    if not height or not width:
        raise ValueError(
            f"Images of {shape[1]} × {shape[2]} pixels are too small to be pooled by {config.pooling} after each of "
            f"{len(config.channels)} convolutions. Use fewer `channels`, or a smaller `pooling`."
        )
    return height, width, (shape[-1], *config.channels)[-1]
