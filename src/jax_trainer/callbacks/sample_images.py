"""Logs samples of a generative model as images during training."""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np
from compoconf import register

from jax_trainer.callbacks.sampling import Sampling, SamplingConfig
from jax_trainer.settings import AtLeast

SHOWN_SIDE, GAP = 32, 2  # pixels: small images are magnified to about this size; the gap between images


@dataclass
class SampleImagesConfig(SamplingConfig):
    """Options of the sampled images.

    Args:
        per_class: number of images per class; for a dataset without classes, number of rows of ten.
        steps: number of sampler steps; null: the objective's default.
        guidance: classifier-free guidance scale; null: the objective's default.
    """

    per_class: Annotated[int, AtLeast(1)] = 8
    steps: Annotated[int, AtLeast(1)] | None = None
    guidance: Annotated[float, AtLeast(0)] | None = None


@register
class SampleImages(Sampling):
    """Samples images of every class, and logs them as one image, `samples/images`: a column per class.

    It is in `media/` of the run folder and in TensorBoard. `samples/per_second` is the sampling speed.
    """

    config: SampleImagesConfig
    trainer_method = "sample"

    def draw(self, key: jax.Array, step: int) -> int:
        config = self.config
        dataset: Any = self.run.dataset
        classes = getattr(getattr(dataset, "config", None), "num_classes", 0)
        columns = classes or 10
        labels = np.tile(np.arange(classes, dtype=np.int32), config.per_class) if classes else None
        options = {"steps": config.steps, "guidance": config.guidance, "state": self.state}
        samples = np.asarray(self.trainer.sample(key, labels, count=columns * config.per_class, **options))
        shown = dataset.pixels(samples) if hasattr(dataset, "pixels") else stretched(samples)
        self.run.logger.log_image("samples/images", grid(shown, columns), step)
        return len(samples)


def stretched(images: np.ndarray) -> np.ndarray:
    """Images scaled to the range from 0 to 1, if the dataset has no scaling."""
    low, high = images.min(), images.max()
    return (images - low) / max(high - low, 1e-6)


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Images [n, h, w, c] side by side, row by row, magnified where they are small: [height, width, c].

    >>> grid(np.zeros((6, 8, 8, 1)), 3).shape
    (70, 104, 1)
    """
    times = max(1, SHOWN_SIDE // max(images.shape[1:3]))
    images = images.repeat(times, axis=1).repeat(times, axis=2)
    images = np.pad(images, ((0, 0), (GAP, 0), (GAP, 0), (0, 0)), constant_values=1)
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    images = np.pad(images, ((0, rows * columns - count), (0, 0), (0, 0), (0, 0)), constant_values=1)
    joined = images.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    joined = joined.reshape(rows * height, columns * width, channels)
    return np.pad(joined, ((0, GAP), (0, GAP), (0, 0)), constant_values=1)
