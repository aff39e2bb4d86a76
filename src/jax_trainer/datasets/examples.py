"""Standard datasets: each takes its configuration and locates, checks and splits its files."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import register

from jax_trainer.config.settings import Problem, SettingsError
from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.files import (
    CIFAR10_FILES,
    FASHION_MNIST_FILES,
    MNIST_FILES,
    FileSet,
    check_labels,
    read_cifar10,
    read_idx,
)
from jax_trainer.datasets.module import Count, DatasetConfig, DatasetModule, Size
from jax_trainer.datasets.text import TextConfig, TextDataset, Tokenizer, Vocabulary
from jax_trainer.datasets.transforms import DeviceTransforms, ImageTransform, normalize

__all__ = [
    "CIFAR10Config",
    "CIFAR10Dataset",
    "DigitsConfig",
    "DigitsDataset",
    "FashionMNISTConfig",
    "FashionMNISTDataset",
    "ImageConfig",
    "ImageDataset",
    "ImageSet",
    "MNISTConfig",
    "MNISTDataset",
    "TextConfig",
    "TextDataset",
    "Tokenizer",
    "Vocabulary",
]

Resolution = tuple[Size, Size]
Part = tuple[np.ndarray, np.ndarray]  # images [n, h, w, c] uint8 and labels [n] int32


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """The properties of an image dataset. `mean` and `std` are per channel, of pixels divided by 255.

    `white` is the maximum pixel value; `files` are those that are read and downloaded.
    """

    title: str
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    white: int = 255
    files: FileSet | None = None


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
        (images, labels), most = train, max(len(train[1]) - 1, 0)
        if config.val_size > most:
            text = (
                f"`val_size` is {config.val_size}, but the training files of {facts.title} have {len(labels)} examples."
            )
            raise SettingsError([("val_size", f"{text} Use at most {most}.")])
        order = np.random.default_rng(config.split_seed).permutation(len(labels))
        held_out, kept = order[: config.val_size], order[config.val_size :][: config.limit_train_size]
        scaling = normalize(facts.mean, facts.std)
        scalings = (_on_channels_first(scaling) if config.channels_first else scaling,) if config.normalize else ()
        super().__init__(
            config,
            _batch(images[kept], labels[kept], config),
            _batch(images[held_out], labels[held_out], config) if config.val_size else None,
            _batch(*test, config),
            metadata={
                **{name: getattr(facts, name) for name in ("title", "source", "mean", "std", "white")},
                **{name: getattr(config, name) for name in ("resolution", "channels_first")},
                **{name: getattr(config, name) for name in ("num_classes", "num_channels")},
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


def _batch(images: np.ndarray, labels: np.ndarray, config: ImageConfig) -> SupervisedBatch:
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


DIGITS_SOURCE = (
    "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, "
    "doi 10.24432/C50P49, licence CC BY 4.0 (the 1,797 images of its test part)"
)
_DIGIT_NAMES = tuple(str(digit) for digit in range(10))


DIGITS = ImageSet(
    title="Digits",
    shape=(8, 8, 1),
    class_names=_DIGIT_NAMES,
    mean=(0.01915,),  # its values go from 0 to 16, so these are small
    std=(0.02360,),
    source=DIGITS_SOURCE,
    white=16,
)


@dataclass
class DigitsConfig(ImageConfig):
    """The 8×8 digits that ship with the package: 1,797 images, of which 180 are test images."""

    resolution: Resolution = (8, 8)
    val_size: Count = 180
    facts = DIGITS


@register
class DigitsDataset(ImageDataset):
    """The 8×8 handwritten digits that ship with the package; pixels go from 0 to 16.

    >>> data = DigitsDataset(DigitsConfig(global_batch_size=32))
    >>> data.train.input.shape, len(data.val), len(data.test)
    ((1437, 8, 8, 1), 180, 180)
    """

    config: DigitsConfig

    def __init__(self, config: DigitsConfig) -> None:
        parts = load_digits(config.split_seed)  # already in the order of the seed: test, then the others
        images, labels = (np.concatenate([parts["val"][name], parts["train"][name]]) for name in ("image", "label"))
        super().__init__(
            config, (images[..., None], labels), (parts["test"]["image"][..., None], parts["test"]["label"])
        )


def load_digits(split_seed: int = 42) -> dict[str, dict[str, np.ndarray]]:
    """The digits as `train` (1,437), `val` (180) and `test` (180): `image` [n, 8, 8] uint8 (0 to 16), `label` [n].

    >>> {name: len(part["label"]) for name, part in load_digits().items()}
    {'train': 1437, 'val': 180, 'test': 180}
    """
    file = resources.files("jax_trainer.datasets") / "data" / "digits.npz"
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int32)
    order = np.random.default_rng(split_seed).permutation(len(labels))
    cuts = {"test": order[:180], "val": order[180:360], "train": order[360:]}
    return {name: {"image": images[cuts[name]], "label": labels[cuts[name]]} for name in ("train", "val", "test")}


MNIST = ImageSet(
    title="MNIST",
    shape=(28, 28, 1),
    class_names=_DIGIT_NAMES,
    mean=(0.1307,),
    std=(0.3081,),
    source="The MNIST database of handwritten digits, Y. LeCun, C. Cortes and C. J. C. Burges, 1998",
    files=MNIST_FILES,
)


@dataclass
class MNISTConfig(ImageConfig):
    """Handwritten digits, 28×28: 60,000 training and 10,000 test images, from four IDX files."""

    resolution: Resolution = (28, 28)
    facts = MNIST


@register
class MNISTDataset(ImageDataset):
    """MNIST from its IDX files in `data_dir` or `data_dir/MNIST/raw`."""

    config: MNISTConfig

    def __init__(self, config: ImageConfig) -> None:
        paths = _located(config)
        super().__init__(config, _read_idx_part(config, *paths[:2]), _read_idx_part(config, *paths[2:]))


FASHION_MNIST = ImageSet(
    title="Fashion-MNIST",
    shape=(28, 28, 1),
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    mean=(0.2860,),
    std=(0.3530,),
    source="Fashion-MNIST, H. Xiao, K. Rasul and R. Vollgraf, Zalando, 2017, arXiv 1708.07747, licence MIT",
    files=FASHION_MNIST_FILES,
)


@dataclass
class FashionMNISTConfig(ImageConfig):
    """Clothes, 28×28: 60,000 training and 10,000 test images, from four IDX files."""

    resolution: Resolution = (28, 28)
    facts = FASHION_MNIST


@register
class FashionMNISTDataset(MNISTDataset):
    """Fashion-MNIST from its IDX files in `data_dir` or `data_dir/FashionMNIST/raw`: it has the format of MNIST."""

    config: FashionMNISTConfig  # pyright: ignore[reportIncompatibleVariableOverride]


CIFAR10 = ImageSet(
    title="CIFAR-10",
    shape=(32, 32, 3),
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    source="Learning Multiple Layers of Features from Tiny Images, A. Krizhevsky, 2009",
    files=CIFAR10_FILES,
)


@dataclass
class CIFAR10Config(ImageConfig):
    """Photographs of ten classes, 32×32 in colour: 50,000 training and 10,000 test images."""

    resolution: Resolution = (32, 32)
    num_channels: Size = 3
    facts = CIFAR10


@register
class CIFAR10Dataset(ImageDataset):
    """CIFAR-10 from the files of its binary version, in `data_dir` or `data_dir/cifar-10-batches-bin`."""

    config: CIFAR10Config

    def __init__(self, config: CIFAR10Config) -> None:
        parts = [(path, *read_cifar10(path)) for path in _located(config)]
        checked = [(images, check_labels(labels, config.num_classes, path)) for path, images, labels in parts]
        images, labels = zip(*checked[:-1], strict=True)
        super().__init__(config, (np.concatenate(images), np.concatenate(labels)), checked[-1])


def _located(config: ImageConfig) -> list[Path]:
    files: Any = config.facts.files
    return files.locate(config.facts.title, config.data_dir, download=config.download)


def _read_idx_part(config: ImageConfig, image_file: Path, label_file: Path) -> Part:
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    if images.shape[1:] != config.facts.shape[:2]:
        text = f"{image_file} has images of {images.shape[1:]}, but {config.facts.title} has {config.facts.shape[:2]}."
        raise ValueError(text)
    if len(images) != len(labels):
        text = f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels."
        raise ValueError(f"{text} Download both again.")
    return images[..., None], check_labels(labels, config.num_classes, label_file)
