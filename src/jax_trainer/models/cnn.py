"""A small convolutional network for images."""

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.models.layers import ACTIVATIONS, ActFn, Hidden, Images, Rate, Size, batch_norm, flat, image_shape


@dataclass
class CNNConfig(BaseModelConfig):
    """Configuration of `CNN`.

    Args:
        channels: output channels of each convolution.
        kernel: kernel size of the convolutions, in pixels.
        pooling: window size and stride of the max pooling after each convolution; 1: no pooling.
        hidden: width of the hidden layer.
        num_classes: number of classes.
        act_fn: activation after each convolution and in the hidden layer.
        dropout: dropout rate of the hidden layer.
        batch_norm: apply BatchNorm before each activation.
    """

    channels: tuple[Size, ...] = (16, 32)
    kernel: Size = 3
    pooling: Size = 2
    hidden: Size = 128
    num_classes: Size = 10
    act_fn: ActFn = "gelu"
    dropout: Rate = 0.0
    batch_norm: bool = True


class Convolution(nnx.Module):
    """Convolution, max pooling, optional BatchNorm, activation: [batch, h, w, inputs] → [batch, h / p, w / p, outputs].

    Pooling comes first, because BatchNorm and activation of all pixels would be the most expensive part.
    """

    def __init__(self, config: CNNConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(inputs, outputs, (config.kernel, config.kernel), rngs=rngs)
        self.pooling = config.pooling
        self.norm = batch_norm(outputs, config.batch_norm, rngs=rngs)
        self.act_fn = ACTIVATIONS[config.act_fn]

    def __call__(self, x: Images) -> Images:
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

    def __call__(self, images: Images) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes]."""
        x = images
        for convolution in self.convolutions:
            x = convolution(x)
        return self.out(self.hidden(flat(x)))


def max_pool(
    x: Float[Array, "batch height width channels"], size: int
) -> Float[Array, "batch pooled_height pooled_width channels"]:
    """Max pooling with a window and stride of `size`; remaining pixels at the edges are dropped.

    On the CPU three times as fast as `reduce_window`, whose gradient has to search for the maximum again.
    """
    for axis in (1, 2):
        end = x.shape[axis] // size * size
        slices = [jax.lax.slice_in_dim(x, first, end, size, axis) for first in range(size)]
        x = reduce(jnp.maximum, slices)
    return x


def _pooled_shape(config: CNNConfig, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width and channels after the last convolution."""
    height, width, channels = image_shape("CNN", shape)
    shrink = config.pooling ** len(config.channels)
    if min(height, width) < shrink:
        raise ValueError(
            f"Images of {height} × {width} pixels are too small to be pooled by {config.pooling} after each of "
            f"{len(config.channels)} convolutions. Use fewer `channels`, or a smaller `pooling`."
        )
    return height // shrink, width // shrink, (channels, *config.channels)[-1]
