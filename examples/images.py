"""Train a small convolutional network on images: digits, MNIST, Fashion-MNIST or CIFAR-10.

    python examples/images.py                                   # the digits that ship with the package
    python scripts/fetch_data.py --only mnist && python examples/images.py --set mnist --epochs 1

Images are sent to the device as uint8 and normalized there; those of CIFAR-10 are also cropped and flipped. With
`--resident` the training set is kept on the device, and one dispatch trains a full epoch.
"""

import argparse
from dataclasses import replace
from typing import Any

import jax
import optax
from flax import nnx
from rich.console import Console

from jax_trainer import Every, Plan, ProgressBar, compile_program, evaluate, nnx_program, run
from jax_trainer.datasets import random_crop, random_flip, with_transforms
from jax_trainer.datasets.examples import (
    CIFAR10Config,
    CIFAR10Dataset,
    DigitsConfig,
    DigitsDataset,
    FashionMNISTConfig,
    FashionMNISTDataset,
    ImageDataset,
    MNISTConfig,
    MNISTDataset,
)

SETS: dict[str, tuple[type[Any], type[Any]]] = {
    "digits": (DigitsDataset, DigitsConfig),
    "mnist": (MNISTDataset, MNISTConfig),
    "fashion-mnist": (FashionMNISTDataset, FashionMNISTConfig),
    "cifar10": (CIFAR10Dataset, CIFAR10Config),
}


class Network(nnx.Module):
    """Two convolutions with pooling, and two linear layers: [batch, h, w, c] → [batch, classes]."""

    def __init__(self, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        self.conv1 = nnx.Conv(channels, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear((height // 4) * (width // 4) * 64, 128, rngs=rngs)
        self.head = nnx.Linear(128, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def loss(model: Network, batch: Any, train: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss to minimize, and other metrics to log."""
    logits = model(batch.input)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch.target).mean()
    return value, {"acc": (logits.argmax(-1) == batch.target).mean()}


def main() -> dict[str, float]:
    """Reads the command line, trains, shows the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="digits")
    parser.add_argument("--data-dir", default="data/")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--resident", action="store_true")
    args = parser.parse_args()

    kind, config = SETS[args.set]
    dataset: ImageDataset = kind(config(data_dir=args.data_dir, global_batch_size=args.batch_size))
    transforms = dataset.transforms
    if args.set == "cifar10":
        transforms = replace(transforms, train=(random_crop(4), random_flip(), *transforms.train))

    shape, classes = dataset.train.input.shape[1:], len(dataset.class_names)
    program = nnx_program(lambda rngs: Network(shape, classes, rngs), loss, optax.adam(1e-3))
    compiled = compile_program(with_transforms(program, transforms))
    state = compiled.init(jax.random.key(0), next(iter(dataset.train_loader)))
    plan = Plan(max_epochs=args.epochs, eval_every=Every(epochs=1), steps_per_call="epoch" if args.resident else 1)
    state = run(compiled, state, dataset.data(resident=args.resident), plan, [ProgressBar()])
    metrics = evaluate(compiled, state, {"test": dataset.test_loader})["test"]
    Console().print(f"{dataset.metadata['title']}: test accuracy {metrics['acc']:.2%}, loss {metrics['loss']:.4f}")
    return metrics


if __name__ == "__main__":
    main()
