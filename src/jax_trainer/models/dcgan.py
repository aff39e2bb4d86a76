"""A small generative adversarial network for images: a generator and a discriminator of convolutions."""

from dataclasses import dataclass
from typing import Annotated, Any

from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import AtLeast
from jax_trainer.models.layers import Images, Size, flat

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
