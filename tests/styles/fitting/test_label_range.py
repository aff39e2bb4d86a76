"""Labels out of range, in the form of the README."""

import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import ArrayLoader, SupervisedBatch, fit
from jax_trainer.diagnostics.traced import IndexRangeError
from jax_trainer.logger import LoggerConfig
from jax_trainer.trainer import ImgClassifierTrainer

X = np.zeros((200, 4), np.float32)
Y = np.arange(200) % 10


def fitted(folder, train, val, **options):
    shared = {"progress": False, "tensorboard": False, "save": False, "num_epochs": 1, "log_dir": folder}
    loss_fn = optax.softmax_cross_entropy_with_integer_labels
    model = nnx.Linear(4, 10, rngs=nnx.Rngs(0))
    return fit(model, (X, train), (X, val), loss_fn=loss_fn, optimizer=optax.sgd(0.1), **shared, **options)


def test_labels_from_1_are_refused_wherever_they_are(tmp_path_factory, subtests):
    for where in ["train", "val"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(where=where):
            train, val = (Y + 1, Y) if where == "train" else (Y, Y + 1)
            with pytest.raises(IndexRangeError, match=r"1 to 10.*subtract 1"):
                fitted(tmp_path, train, val)


def test_the_range_is_that_of_all_labels_and_not_of_the_first_batch(tmp_path_factory, subtests):
    for where in ["train", "val"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(where=where):
            late = np.sort(Y)[::-1] + 1
            train, val = (late, Y) if where == "train" else (Y, late)
            with pytest.raises(IndexRangeError, match=r"1 to 10.*subtract 1"):
                fitted(tmp_path, train, val, batch_size=8)


def test_the_range_of_a_trainer_is_that_of_all_labels(tmp_path):
    late = (np.sort(Y)[::-1] + 1).astype(np.int32)
    batches = ArrayLoader(SupervisedBatch(size=200, input=X, target=late), 8)
    trainer = ImgClassifierTrainer(
        model=nnx.Linear(4, 10, rngs=nnx.Rngs(0)),
        optimizer=optax.sgd(0.1),
        exmp_input=SupervisedBatch(size=8, input=X[:8], target=Y[:8]),
        num_classes=10,
        train_epochs=1,
        enable_progress_bar=False,
        logger=LoggerConfig(log_dir=str(tmp_path)),
    )
    with pytest.raises(IndexRangeError, match=r"1 to 10.*subtract 1"):
        trainer.train_model(batches)
