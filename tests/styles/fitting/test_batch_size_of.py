"""`batch_size_of`: a function that counts the examples of a batch, by which `fit` weights its metrics."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import fit
from jax_trainer.testing import linear_program

ROWS, SIZES = [4, 4, 4], [1, 3, 2]  # such as nodes, of that many graphs
BATCHES = [
    {
        "x": np.full((n, 1), k, np.float32),
        "y": np.zeros(n, np.float32),
        "edges": np.zeros((7, 2)),
        "real": np.arange(5) < s,
    }
    for k, (n, s) in enumerate(zip(ROWS, SIZES, strict=True))
]
MEAN = np.average([0, 1, 2], weights=SIZES)


def fitted(folder: Any, *data: Any, **changes: Any) -> Any:
    model = nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"model": model, "loss_fn": lambda outputs, targets: outputs[:, 0] - targets}
    options |= {"optimizer": optax.sgd(0.0), "num_epochs": 1, "save": False, "progress": False, "log_dir": folder}
    train, test = data
    return fit(train_ds=train, test_ds=test, **options | changes)


def test_metrics_of_epochs_and_evaluations_are_weighted_by_the_counted_examples(tmp_path):
    with pytest.raises(ValueError, match=r"leading sizes \[4, 5, 7\].*batch_size_of"):
        fitted(tmp_path, BATCHES, BATCHES)
    metrics = fitted(tmp_path, BATCHES, BATCHES, batch_size_of=lambda batch: batch["real"].sum()).history[1]
    assert metrics["train/loss"] == metrics["val/loss"] == pytest.approx(MEAN)


def test_it_is_called_with_the_batches_of_the_data(tmp_path):
    x, y = np.arange(10, dtype=np.float32)[:, None], np.zeros(10, np.float32)
    seen = []

    def count(batch: Any) -> Any:
        seen.append(sorted(batch))
        return len(batch["x"])

    # the last batch of the evaluation is smaller: padding would be counted
    more = {"batch_size": 4, "sample_weight": np.full(10, 2.0), "batch_size_of": count}
    metrics = fitted(tmp_path, {"x": x, "y": y}, {"x": x, "y": y}, **more).history[1]
    assert metrics["val/loss"] == pytest.approx(4.5)
    assert metrics["train/loss"] == pytest.approx(9.0)
    assert seen == [["x", "y"]] * len(seen)


def test_a_program_counts_by_itself(tmp_path):
    changes: Any = {"model": linear_program(), "loss_fn": None, "optimizer": None, "batch_size_of": len}
    with pytest.raises(TypeError, match="batch_size_of.*Program"):
        fitted(tmp_path, BATCHES, None, **changes)
