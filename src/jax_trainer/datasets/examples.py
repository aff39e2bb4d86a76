"""Standard datasets: each takes its configuration and locates, checks and splits its files."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from compoconf import register

from jax_trainer.datasets.files import (
    CIFAR10_FILES,
    FASHION_MNIST_FILES,
    MNIST_FILES,
    FileSet,
    check_labels,
    read_cifar10,
    read_idx,
)
from jax_trainer.datasets.images import ImageConfig, ImageDataset, ImageSet, Part, Resolution
from jax_trainer.datasets.module import Count, Size
from jax_trainer.datasets.text import TextConfig, TextDataset, Tokenizer, Vocabulary

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

    def __init__(self, config: MNISTConfig) -> None:
        super().__init__(config, *_read_idx_set(config, MNIST_FILES))


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
)


@dataclass
class FashionMNISTConfig(ImageConfig):
    """Clothes, 28×28: 60,000 training and 10,000 test images, from four IDX files."""

    resolution: Resolution = (28, 28)
    facts = FASHION_MNIST


@register
class FashionMNISTDataset(ImageDataset):
    """Fashion-MNIST from its IDX files in `data_dir` or `data_dir/FashionMNIST/raw`."""

    config: FashionMNISTConfig

    def __init__(self, config: FashionMNISTConfig) -> None:
        super().__init__(config, *_read_idx_set(config, FASHION_MNIST_FILES))


CIFAR10 = ImageSet(
    title="CIFAR-10",
    shape=(32, 32, 3),
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    source="Learning Multiple Layers of Features from Tiny Images, A. Krizhevsky, 2009",
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
        paths = CIFAR10_FILES.locate("CIFAR-10", config.data_dir, download=config.download)
        parts = [(path, *read_cifar10(path)) for path in paths]
        checked = [(images, check_labels(labels, config.num_classes, path)) for path, images, labels in parts]
        images, labels = zip(*checked[:-1], strict=True)
        super().__init__(config, (np.concatenate(images), np.concatenate(labels)), checked[-1])


def _read_idx_set(config: ImageConfig, files: FileSet) -> tuple[Part, Part]:
    paths = files.locate(config.facts.title, config.data_dir, download=config.download)
    return _read_idx_part(config, *paths[:2]), _read_idx_part(config, *paths[2:])


def _read_idx_part(config: ImageConfig, image_file: Path, label_file: Path) -> Part:
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    height, width, _ = config.facts.shape
    if images.shape[1:] != (height, width):
        raise ValueError(
            f"{image_file} has images of {images.shape[1:]}, but {config.facts.title} has {height, width}."
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels. Download both again."
        )
    return images[..., None], check_labels(labels, config.num_classes, label_file)
