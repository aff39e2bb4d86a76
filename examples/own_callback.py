"""A callback of your own: the hardest images of each epoch, in a file of the run folder, and an early end.

    python examples/own_callback.py

A callback sees the events of a run. This one evaluates each image itself, writes what it found, keeps a state that is
saved with checkpoints, and stops the training when the same images have stayed the hardest.
"""
# Expected: an end before epoch 30, after about 10 s on two CPU cores.

import json
from typing import Any

import numpy as np
import optax
from flax import nnx

from jax_trainer import Callback, LoggerConfig, StopTraining, SupervisedBatch, TrainerModule, load_digits
from jax_trainer.datasets import DatasetConfig, DatasetModule


class HardestImages(Callback):
    """Writes the validation images with the largest loss; stops if they stay the same."""

    def __init__(self, count: int = 5, patience: int = 3) -> None:
        super().__init__()
        self.count, self.patience = count, patience

    def reset(self) -> None:
        self.last: list[int] = []
        self.unchanged = 0

    def on_validation_epoch_end(self, eval_metrics: Any, epoch: int) -> None:
        data = self.trainer.dataset.val
        logits = self.trainer.bind_model()(data.input)
        losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, data.target))
        hardest = sorted(int(row) for row in losses.argsort()[-self.count :])
        self.unchanged = self.unchanged + 1 if hardest == self.last else 0
        self.last = hardest
        with open(self.run.folder / "hardest.jsonl", "a") as file:
            file.write(json.dumps({"epoch": epoch, "rows": hardest, "loss": float(losses[hardest].mean())}) + "\n")
        if self.unchanged >= self.patience:
            raise StopTraining(f"The {self.count} hardest images are the same for {self.patience} epochs.")

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "unchanged": self.unchanged}

    def load_state_dict(self, state: Any) -> None:
        self.last, self.unchanged = list(state["last"]), state["unchanged"]


class Classifier(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        logits = model(batch.input)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.target).mean(), {}


def main(epochs: int = 60, out: str = "runs", patience: int = 3) -> dict[str, Any]:
    """Trains, and returns the number of epochs, and the rows of the hardest images."""
    parts = {
        name: SupervisedBatch.of(part["image"].reshape(-1, 64).astype(np.float32) / 16, part["label"])
        for name, part in load_digits().items()
    }
    data = DatasetModule(DatasetConfig(global_batch_size=60), parts["train"], parts["val"])
    hardest = HardestImages(patience=patience)
    trainer = Classifier(
        model=lambda rngs: nnx.Linear(64, 10, rngs=rngs),
        optimizer=optax.adam(1e-2),
        dataset=data,
        train_epochs=epochs,
        callbacks=[hardest],
        logger=LoggerConfig(log_dir=out),
    )
    results = trainer.train_model(data.train_loader, data.val_loader)
    return {"epochs": max(epoch for epoch in results if isinstance(epoch, int)), "rows": hardest.last}


if __name__ == "__main__":
    print(main())
