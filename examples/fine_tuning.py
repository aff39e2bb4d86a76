"""Fine-tuning: learn five digits, then the other five from few images, with the first layers frozen.

    python examples/fine_tuning.py

The second training loads the weights of the first by name, but not its head, and freezes the encoder: its bits stay
as they are. The same network from random weights is the comparison.
"""
# Expected: with 10 images per class, a higher accuracy than from random weights, after about 20 s on two CPU cores.

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_trainer import ImgClassifierTrainer, LoggerConfig, SupervisedBatch, load_digits
from jax_trainer.callbacks import ModelCheckpoint
from jax_trainer.datasets import DatasetConfig, DatasetModule
from jax_trainer.optimizer import AdamWConfig


class Network(nnx.Module):
    """A convolutional encoder and a linear head: images [batch, 8, 8, 1] to logits [batch, 5]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        conv1, conv2 = nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.encoder = nnx.Sequential(conv1, nnx.relu, conv2, nnx.relu)
        self.head = nnx.Linear(4 * 4 * 32, 5, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.encoder(images).reshape(len(images), -1))


def digits(first: int, per_class: int | None = None) -> DatasetModule:
    """Five digits from `first` on, as classes 0 to 4; of each, `per_class` images to train with."""
    parts = {}
    for name, part in load_digits().items():
        images, labels = np.float32(part["image"][..., None] / 16), part["label"] - first
        rows = [np.flatnonzero(labels == label)[: per_class if name == "train" else None] for label in range(5)]
        kept = np.concatenate(rows)
        parts[name] = SupervisedBatch.of(images[kept], labels[kept])
    return DatasetModule(DatasetConfig(global_batch_size=25), parts["train"], parts["val"], parts["test"])


def train(data: DatasetModule, epochs: int, out: str, start: Any = None, freeze: str = "") -> ImgClassifierTrainer:
    """Trains on `data`, from the weights of the run in `start`."""
    trainer = ImgClassifierTrainer(
        model=Network,
        optimizer=optax.adam(3e-3) if not freeze else None,
        optimizer_config=AdamWConfig(learning_rate=3e-3, freeze=freeze) if freeze else None,
        dataset=data,
        num_classes=5,
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


def main(epochs: int = 10, out: str = "runs") -> dict[str, float]:
    """Trains thrice, and returns the test accuracy of the new digits with and without the first training."""
    known, new = digits(0), digits(5, per_class=10)
    pretrained = train(known, epochs, f"{out}/known")
    assert pretrained.folder is not None
    tuned = train(new, epochs, f"{out}/tuned", start=pretrained.folder.path, freeze="encoder")
    scratch = train(new, epochs, f"{out}/scratch")
    before, after = (one.state.params["encoder"] for one in (pretrained, tuned))
    assert epochs > 1 or jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, after))
    accuracy = {
        name: one.test_model(new.test_loader)["test/acc"] for name, one in (("tuned", tuned), ("scratch", scratch))
    }
    return {name: float(value) for name, value in accuracy.items()}


if __name__ == "__main__":
    print(main())
