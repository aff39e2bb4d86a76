"""Base classes of image datasets: the validation split, resizing and normalization."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.config.settings import Problem, SettingsError
from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.module import DatasetConfig, DatasetModule, Size
from jax_trainer.datasets.transforms import DeviceTransforms, ImageTransform, normalize

Resolution = tuple[Size, Size]
Part = tuple[np.ndarray, np.ndarray]  # images [n, h, w, c] uint8 and labels [n] int32


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """The properties of an image dataset. `mean` and `std` are per channel, of pixels divided by 255.

    `white` is the maximum pixel value.
    """

    title: str
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    white: int = 255


@dataclass
class ImageConfig(DatasetConfig):
    """Configuration of image datasets.

    Args:
        resolution: height and width. If they differ from the dataset's, images are resized to uint8 when they are
            loaded, bilinearly with antialiasing (as `jax.image.resize(…, "linear")`).
        channels_first: images as [n, c, h, w] instead of [n, h, w, c].
        num_classes, num_channels: properties of the dataset, for models that read them here.
        aux: anything; copied to the metadata.

    Attributes:
        facts: the properties of the dataset.
    """

    resolution: Resolution = (1, 1)
    channels_first: bool = False
    num_classes: Size = 10
    num_channels: Size = 1
    aux: dict[str, Any] = field(default_factory=dict)
    facts: ClassVar[ImageSet]

    def __post_init__(self) -> None:
        super().__post_init__()
        height, width = self.resolution  # a list, if it was read from a file
        self.resolution = (height, width)

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict the properties of the dataset."""
        facts = self.facts
        expected = {"num_classes": len(facts.class_names), "num_channels": facts.shape[-1]}
        for name, value in expected.items():
            if getattr(self, name) != value:
                yield name, f"`{name}` of {facts.title} is {value}, got {getattr(self, name)!r}."


class ImageDataset(DatasetModule):
    """An image dataset of training files, of which some examples are held out for validation, and test files."""

    def __init__(self, config: ImageConfig, train: Part, test: Part) -> None:
        facts = config.facts
        train, val = _split(train, config, facts.title)
        scaling = normalize(facts.mean, facts.std)
        scalings = (_on_channels_first(scaling) if config.channels_first else scaling,) if config.normalize else ()
        super().__init__(
            config,
            _batch(train, config),
            _batch(val, config) if config.val_size else None,
            _batch(test, config),
            metadata={
                "title": facts.title,
                "source": facts.source,
                "mean": facts.mean,
                "std": facts.std,
                "white": facts.white,
                "resolution": config.resolution,
                "channels_first": config.channels_first,
                "num_classes": config.num_classes,
                "num_channels": config.num_channels,
                "aux": dict(config.aux),
            },
            class_names=facts.class_names,
            transforms=DeviceTransforms(train=scalings, eval=scalings),
        )

    def pixels(self, images: Any) -> np.ndarray:
        """Normalized images, such as model inputs and samples, as displayable ones: [n, h, w, c] floats from 0 to 1."""
        config: Any = self.config
        facts, shown = config.facts, np.asarray(images, np.float32)
        shown = np.moveaxis(shown, 1, -1) if config.channels_first else shown
        shown = shown * np.float32(facts.std) + np.float32(facts.mean) if config.normalize else shown / 255
        return np.clip(shown * (255 / facts.white), 0, 1)


def _split(part: Part, config: ImageConfig, title: str) -> tuple[Part, Part]:
    images, labels = part
    if config.val_size and config.val_size >= len(labels):
        text = f"`val_size` is {config.val_size}, but the training files of {title} have {len(labels)} examples."
        raise SettingsError([("val_size", f"{text} Use at most {max(len(labels) - 1, 0)}.")])
    order = np.random.default_rng(config.split_seed).permutation(len(labels))
    val, train = order[: config.val_size], order[config.val_size :][: config.limit_train_size]
    return (images[train], labels[train]), (images[val], labels[val])


def _batch(part: Part, config: ImageConfig) -> SupervisedBatch:
    images, labels = part
    if images.shape[1:3] != config.resolution:
        images = resize(images, config.resolution)
    if config.channels_first:
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return SupervisedBatch.of(images, labels)


def resize(images: np.ndarray, resolution: tuple[int, int]) -> np.ndarray:
    """Resizes uint8 images [n, h, w, c] bilinearly, with antialiasing.

    >>> resize(np.array([[[0], [100]]], np.uint8)[None], (1, 4))[0, 0, :, 0]
    array([  0,  25,  75, 100], dtype=uint8)
    """
    rows, columns = (_weights(old, new) for old, new in zip(images.shape[1:3], resolution, strict=True))
    resized = np.empty((len(images), *resolution, images.shape[3]), np.uint8)
    for start in range(0, len(images), 1000):  # all images as float32 at once would take four times their memory
        piece = images[start : start + 1000].astype(np.float32)
        piece = np.einsum("yh,nhwc,xw->nyxc", rows, piece, columns, optimize=True)
        resized[start : start + 1000] = np.clip(np.rint(piece), 0, 255)
    return resized


def _weights(old: int, new: int) -> np.ndarray:
    scale = old / new
    centres = (np.arange(new)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - abs(np.arange(old) - centres) / max(scale, 1))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _on_channels_first(transform: ImageTransform) -> ImageTransform:
    def apply(key: jax.Array, images: jax.Array) -> jax.Array:
        return jnp.moveaxis(transform(key, jnp.moveaxis(images, 1, -1)), -1, 1)

    return apply
