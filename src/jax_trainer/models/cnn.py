"""Convolutional networks for images: `CNN`, residual networks in the published depths, and `DCGAN`.

"Deep Residual Learning for Image Recognition" (He et al., 2016), with a bottleneck's stride in its 3 × 3 convolution.
"""

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast
from jax_trainer.models.layers import (
    ACTIVATIONS,
    ActFn,
    Hidden,
    Images,
    Rate,
    Size,
    batch_norm,
    flat,
    image_shape,
    unchanged,
)


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
        options = {"act_fn": config.act_fn, "dropout": config.dropout, "norm": config.batch_norm}
        self.hidden = Hidden(height * width * depth, config.hidden, **options, rngs=rngs)
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


Depth = Literal[18, 34, 50, 101, 152]
Stem = Literal["cifar", "imagenet"]

BLOCKS: dict[Depth, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
FIRST_WITH_BOTTLENECKS = 50
BOTTLENECK = 4  # output channels of a bottleneck, as a multiple of its inner channels


@dataclass
class ResNetConfig(BaseModelConfig):
    """Configuration of `ResNet`.

    Args:
        depth: published depth: 18 and 34 have basic blocks, the others bottleneck blocks.
        stem: "cifar": a 3 × 3 convolution; "imagenet": a 7 × 7 convolution with stride 2, and max pooling.
        num_classes: number of classes.
        width: channels of the first stage; each further stage doubles them.
        act_fn: activation after each BatchNorm.
        zero_init: initialize the last BatchNorm scale of each block to zero, so that blocks start as the identity.
    """

    depth: Depth = 18
    stem: Stem = "cifar"
    num_classes: Size = 10
    width: Size = 64
    act_fn: ActFn = "relu"
    zero_init: bool = True

    @property
    def block_counts(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return BLOCKS[self.depth]

    @property
    def widening(self) -> int:
        """Output channels of a block, as a multiple of its inner channels."""
        return BOTTLENECK if self.depth >= FIRST_WITH_BOTTLENECKS else 1

    @property
    def stage_widths(self) -> tuple[int, ...]:
        """The output channels of each stage."""
        return tuple(self.width * 2**stage * self.widening for stage in range(len(self.block_counts)))


class NormedConvolution(nnx.Module):
    """Convolution without bias, and BatchNorm: [batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, zero: bool = False, rngs: nnx.Rngs
    ) -> None:
        around = (kernel // 2, kernel // 2)  # symmetric, as published: "SAME" pads more at the end
        he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        options: dict[str, Any] = {"padding": (around, around), "use_bias": False, "kernel_init": he_normal}
        self.conv = nnx.Conv(inputs, outputs, (kernel, kernel), stride, **options, rngs=rngs)
        scale_init = nnx.initializers.zeros if zero else nnx.initializers.ones
        self.norm = batch_norm(outputs, scale_init=scale_init, rngs=rngs)

    def __call__(self, x: Images) -> Images:
        """[batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    """A residual block: [batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        outputs = width * config.widening
        if config.widening == 1:
            steps = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            steps = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        last = len(steps) - 1
        self.convolutions = nnx.List(
            NormedConvolution(*sizes, zero=config.zero_init and number == last, rngs=rngs)
            for number, sizes in enumerate(steps)
        )
        fits = stride == 1 and inputs == outputs
        self.shortcut = unchanged if fits else NormedConvolution(inputs, outputs, 1, stride, rngs=rngs)
        self.act_fn = ACTIVATIONS[config.act_fn]

    def __call__(self, x: Images) -> Images:
        """[batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""
        *before, last = self.convolutions
        added = x
        for convolution in before:
            added = self.act_fn(convolution(added))
        return self.act_fn(self.shortcut(x) + last(added))


@register
class ResNet(BaseModelNNX):
    """A residual network on images: [batch, h, w, c] → [batch, num_classes]."""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        _, _, channels = image_shape("ResNet", exmp_input.shape)
        kernel, stride = (3, 1) if config.stem == "cifar" else (7, 2)
        self.stem = NormedConvolution(channels, config.width, kernel, stride, rngs=rngs)
        self.blocks, inputs = nnx.List(), config.width
        for stage, count in enumerate(config.block_counts):
            for number in range(count):
                width, stride = config.width * 2**stage, 2 if stage and not number else 1
                self.blocks.append(ResidualBlock(config, inputs, width, stride, rngs=rngs))
                inputs = width * config.widening
        self.out = nnx.Linear(inputs, config.num_classes, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes]."""
        x = ACTIVATIONS[self.config.act_fn](self.stem(images))
        if self.config.stem == "imagenet":
            around: Any = ((1, 1), (1, 1))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=around)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(axis=(1, 2)))


KERNEL, SCALE = (4, 4), 4  # two convolutions of stride 2 between the smallest feature map and the image


@dataclass
class DCGANConfig(BaseModelConfig):
    """Configuration of `DCGAN`.

    Args:
        latent: size of the noise from which an image is generated.
        width: channels of the smallest feature map; the larger one has half as many.
        bounds: the lowest and the highest value of a pixel, as the model sees it; null: not bounded.
    """

    latent: Size = 64
    width: Annotated[int, AtLeast(2)] = 128
    bounds: tuple[float, float] | None = None


class Generator(nnx.Module):
    """A linear layer and two transposed convolutions with BatchNorm: [batch, latent] → [batch, h, w, c]."""

    def __init__(self, config: DCGANConfig, shape: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        self.start = (height // SCALE, width // SCALE, config.width)
        self.project = nnx.Linear(config.latent, self.start[0] * self.start[1] * config.width, rngs=rngs)
        self.norm = nnx.BatchNorm(config.width, rngs=rngs)
        self.up = nnx.ConvTranspose(config.width, config.width // 2, KERNEL, 2, rngs=rngs)
        self.up_norm = nnx.BatchNorm(config.width // 2, rngs=rngs)
        self.out = nnx.ConvTranspose(config.width // 2, channels, KERNEL, 2, rngs=rngs)
        self.bounds = config.bounds

    def __call__(self, noise: Float[Array, "batch latent"]) -> Images:
        """[batch, latent] → [batch, h, w, c]."""
        x = nnx.relu(self.norm(self.project(noise).reshape(len(noise), *self.start)))
        x = self.out(nnx.relu(self.up_norm(self.up(x))))
        if self.bounds is None:
            return x
        low, high = self.bounds
        return low + (high - low) * nnx.sigmoid(x)


class Discriminator(nnx.Module):
    """Two convolutions of stride 2, and a linear layer: [batch, h, w, c] → [batch], higher for real images."""

    def __init__(self, config: DCGANConfig, shape: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        self.down = nnx.Conv(channels, config.width // 2, KERNEL, 2, rngs=rngs)
        self.down_again = nnx.Conv(config.width // 2, config.width, KERNEL, 2, rngs=rngs)
        self.out = nnx.Linear(height // SCALE * (width // SCALE) * config.width, 1, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch"]:
        """[batch, h, w, c] → [batch]."""
        x = nnx.leaky_relu(self.down(images), 0.2)
        x = nnx.leaky_relu(self.down_again(x), 0.2)
        return self.out(flat(x))[:, 0]


@register
class DCGAN(BaseModelNNX):
    """A generator and a discriminator of convolutions; called with images, it returns the logits of being real.

    Attributes:
        latent: size of the noise that the generator takes.
    """

    config: DCGANConfig

    def __init__(self, config: DCGANConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        shape = exmp_input.shape[1:]
        if shape[0] % SCALE or shape[1] % SCALE:
            raise ValueError(f"The sides of images must be multiples of {SCALE} for DCGAN, got {shape[0]}×{shape[1]}.")
        self.config, self.latent = config, config.latent
        self.generator = Generator(config, shape, rngs=rngs)
        self.discriminator = Discriminator(config, shape, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch"]:
        """[batch, h, w, c] → [batch]."""
        return self.discriminator(images)
