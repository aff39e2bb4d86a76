"""ViT: a transformer on the patches of an image.

"An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (Dosovitskiy et al., 2021).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelNNX
from jax_trainer.models.encoder import EncoderBlock, EncoderConfig, encoder_norm
from jax_trainer.models.layers import INIT_STD, Images, Size, image_shape, linear, precise, through, vectors


@dataclass
class ViTConfig(EncoderConfig):
    """Configuration of `ViT`.

    Args:
        num_classes: number of classes.
        image_size: pixels per side of the images, which are square; null: the sides of the examples.
        patch: pixels per side of a patch; divides the sides of the images.
    """

    num_classes: Size = 10
    image_size: Size | None = None
    patch: Size = 16


@register
class ViT(BaseModelNNX):
    """A transformer on the patches of images: [batch, h, w, c] → [batch, num_classes].

    Its position embeddings fix the size of the images: that of the example.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        self.image = _image(exmp_input.shape, config)
        height, breadth, channels = self.image
        patch, width = (config.patch, config.patch), config.width
        self.patches = nnx.Conv(
            *(channels, width, patch, patch),
            padding="VALID",
            kernel_init=nnx.initializers.normal(INIT_STD),
            rngs=rngs,
        )
        self.class_token = vectors(1, width, rngs=rngs)
        self.positions = vectors(1 + height // config.patch * (breadth // config.patch), width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(EncoderBlock(config, pre_norm=True, rngs=rngs) for _ in range(config.layers))
        self.norm = encoder_norm(config, rngs=rngs)
        self.classifier = linear(width, config.num_classes, bias=True, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes], in float32 at least."""
        return precise(self.classifier, self.last_hidden(images)[:, 0])

    def last_hidden(self, images: Images) -> Float[Array, "batch tokens width"]:
        """The normalized output of the last block: the vector of the class token, then those of the patches."""
        if images.shape[1:] != self.image:
            raise ValueError(f"This ViT takes images of shape {self.image}, got {images.shape[1:]}.")
        patches = self.patches(images.astype(self.patches.kernel[...].dtype))
        patches = patches.reshape(images.shape[0], -1, patches.shape[-1])
        first = jnp.broadcast_to(self.class_token[...], (images.shape[0], 1, patches.shape[-1]))
        x = self.dropout(jnp.concatenate([first, patches], axis=1) + self.positions[...])
        return self.norm(through(self.blocks, x, remat=self.config.remat))


def _image(shape: tuple[int, ...], config: ViTConfig) -> tuple[int, int, int]:
    height, width, channels = image_shape("ViT", shape)
    if config.image_size is not None and (height, width) != 2 * (config.image_size,):
        raise ValueError(
            f"`image_size` is {config.image_size}, but the images have the shape {shape[1:]}. Resize them."
        )
    if height % config.patch or width % config.patch:
        text = f"`patch` must divide height and width of the images evenly, got {config.patch} for {shape[1:]}."
        raise ValueError(text)
    return height, width, channels
