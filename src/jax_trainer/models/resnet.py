"""Residual networks for images, in the published depths.

"Deep Residual Learning for Image Recognition" (He et al., 2016), with a bottleneck's stride in its 3 × 3 convolution.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.models.layers import ACTIVATIONS, ActFn, Images, Size, batch_norm, image_shape, unchanged

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
    def stage_widths(self) -> tuple[int, ...]:
        """The output channels of each stage."""
        return tuple(self.width * 2**stage * _widening(self) for stage in range(len(self.block_counts)))


class NormedConvolution(nnx.Module):
    """Convolution without bias, and BatchNorm: [batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, zero: bool = False, rngs: nnx.Rngs
    ) -> None:
        around = (kernel // 2, kernel // 2)  # symmetric, as published: "SAME" pads more at the end
        he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.conv = nnx.Conv(
            *(inputs, outputs, (kernel, kernel), stride),
            padding=(around, around),
            use_bias=False,
            kernel_init=he_normal,
            rngs=rngs,
        )
        scale_init = nnx.initializers.zeros if zero else nnx.initializers.ones
        self.norm = batch_norm(outputs, scale_init=scale_init, rngs=rngs)

    def __call__(self, x: Images) -> Images:
        """[batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""
        return self.norm(self.conv(x))


class Block(nnx.Module):
    """A residual block: [batch, h, w, inputs] → [batch, h / stride, w / stride, outputs]."""

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs) -> None:
        outputs = width * _widening(config)
        steps = _steps(config, inputs, width, stride)
        last = len(steps) - 1
        self.convolutions = nnx.List(
            NormedConvolution(*sizes, stride=step, zero=config.zero_init and number == last, rngs=rngs)
            for number, (*sizes, step) in enumerate(steps)
        )
        fits = stride == 1 and inputs == outputs
        self.shortcut = unchanged if fits else NormedConvolution(inputs, outputs, 1, stride=stride, rngs=rngs)
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
        self.stem = NormedConvolution(channels, config.width, kernel, stride=stride, rngs=rngs)
        self.blocks = nnx.List(Block(config, *sizes, rngs=rngs) for sizes in _block_sizes(config))
        self.out = nnx.Linear(config.stage_widths[-1], config.num_classes, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes]."""
        x = ACTIVATIONS[self.config.act_fn](self.stem(images))
        if self.config.stem == "imagenet":
            x = _pooled(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(axis=(1, 2)))


def _widening(config: ResNetConfig) -> int:
    return BOTTLENECK if config.depth >= FIRST_WITH_BOTTLENECKS else 1


def _block_sizes(config: ResNetConfig) -> list[tuple[int, int, int]]:
    """The input channels, inner channels and stride of every block."""
    found, inputs = [], config.width
    for stage, count in enumerate(config.block_counts):
        for number in range(count):
            width = config.width * 2**stage
            found.append((inputs, width, 2 if stage and not number else 1))
            inputs = width * _widening(config)
    return found


def _steps(config: ResNetConfig, inputs: int, width: int, stride: int) -> list[tuple[int, int, int, int]]:
    """Inputs, outputs, kernel and stride of each convolution of a block."""
    if config.depth < FIRST_WITH_BOTTLENECKS:
        return [(inputs, width, 3, stride), (width, width, 3, 1)]
    return [(inputs, width, 1, 1), (width, width, 3, stride), (width, BOTTLENECK * width, 1, 1)]


def _pooled(x: jax.Array) -> jax.Array:
    """Max pooling with a 3 × 3 window and stride 2."""
    around: Any = ((1, 1), (1, 1))
    return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=around)
