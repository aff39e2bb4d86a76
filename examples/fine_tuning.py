"""Fine-tuning: a network that knows the ten digits learns from 50 labels which of them are odd.

    python examples/fine_tuning.py

The second training loads the weights of the first by name, but not its head, and freezes the encoder: its bits stay as
they are. The same network from random weights is the comparison.
"""
# Expected: a test accuracy of 0.87, and 0.84 from random weights, after about half a minute on two CPU cores.

from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_trainer import ImgClassifierTrainer, LoggerConfig, SupervisedBatch, load_digits
from jax_trainer.callbacks import ModelCheckpoint
from jax_trainer.datasets import DatasetConfig, DatasetModule
from jax_trainer.optimizer import AdamWConfig


class Network(nnx.Module):
    """An encoder and a linear head: images [batch, 8, 8, 1] to logits [batch, classes]."""

    def __init__(self, rngs: nnx.Rngs, classes: int) -> None:
        conv1, conv2 = nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        flatten = lambda x: x.reshape(len(x), -1)
        last = nnx.Linear(4 * 4 * 32, 32, rngs=rngs)
        self.encoder = nnx.Sequential(conv1, nnx.relu, conv2, nnx.relu, flatten, last, nnx.relu)
        self.head = nnx.Linear(32, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.encoder(images))


def digits(classes: int, examples: int | None = None) -> DatasetModule:
    """The digits, labelled by their remainder: with 10 classes, themselves; with 2, whether they are odd."""
    parts = {
        name: SupervisedBatch.of(part["image"][..., None].astype(np.float32) / 16, part["label"] % classes)
        for name, part in load_digits().items()
    }
    return DatasetModule(DatasetConfig(global_batch_size=25), parts["train"][:examples], parts["val"], parts["test"])


def train(data: DatasetModule, classes: int, epochs: int, out: str, start: Any = None) -> ImgClassifierTrainer:
    """Trains on `data`; with `start`, from the encoder of that run, which is frozen."""
    freeze = "" if start is None else "encoder"
    trainer = ImgClassifierTrainer(
        model=partial(Network, classes=classes),
        optimizer=AdamWConfig(learning_rate=3e-3, freeze=freeze),
        dataset=data,
        num_classes=classes,
        train_epochs=epochs,
        callbacks=[ModelCheckpoint(monitor="val/acc")],
        logger=LoggerConfig(log_dir=out),
        enable_progress_bar=False,
    )
    if start is not None:
        without_head = {"params.head.*": "params.old_head.*"}  # a name that the model does not have: not loaded
        trainer.load_weights(start, which="best", rename=without_head, partial=True)
    trainer.train_model(data.train_loader, data.val_loader)
    return trainer


def main(epochs: int = 50, out: str = "runs") -> dict[str, float]:
    """Trains thrice, and returns the test accuracy of odd or even, with and without the first training."""
    known, new = digits(10), digits(2, examples=50)
    pretrained = train(known, 10, epochs // 5, f"{out}/known")
    assert pretrained.folder is not None
    tuned = train(new, 2, epochs, f"{out}/tuned", start=pretrained.folder.path)
    scratch = train(new, 2, epochs, f"{out}/scratch")
    both = {"tuned": tuned, "scratch": scratch}
    return {name: float(one.test_model(new.test_loader)["test/acc"]) for name, one in both.items()}


if __name__ == "__main__":
    print(main())
