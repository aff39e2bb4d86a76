"""Labels out of range, in the form of the README."""

import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import fit
from jax_trainer.diagnostics.indices import IndexRangeError

X = np.zeros((200, 4), np.float32)
Y = np.arange(200) % 10


def fitted(folder, train, val, **options):
    shared = {"progress": False, "tensorboard": False, "save": False, "num_epochs": 1, "log_dir": folder}
    loss_fn = optax.softmax_cross_entropy_with_integer_labels
    model = nnx.Linear(4, 10, rngs=nnx.Rngs(0))
    return fit(model, (X, train), (X, val), loss_fn=loss_fn, optimizer=optax.sgd(0.1), **shared, **options)


@pytest.mark.parametrize("where", ["train", "val"])
def test_labels_from_1_are_refused_wherever_they_are(tmp_path, where):
    train, val = (Y + 1, Y) if where == "train" else (Y, Y + 1)
    with pytest.raises(IndexRangeError, match=r"1 to 10.*subtract 1"):
        fitted(tmp_path, train, val)


def test_the_range_is_that_of_all_labels_and_not_of_the_first_batch(tmp_path):
    with pytest.raises(IndexRangeError, match=r"1 to 10.*subtract 1"):
        fitted(tmp_path, np.sort(Y)[::-1] + 1, Y, batch_size=8)
