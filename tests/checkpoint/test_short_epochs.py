"""Epochs shorter than the writing of a checkpoint: nothing that a run promises to leave is lost."""

import signal
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer import ArrayLoader, Callback, fit
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.engine import StopTraining
from jax_trainer.testing import assert_same_bits, fault
from tests.rows import noted_row

SLOWLY = "before_manifest:sleep=0.1"  # an epoch takes a few milliseconds
X = np.random.default_rng(0).standard_normal((16, 4), np.float32)
Y = X.sum(1, keepdims=True)
LOADER = ArrayLoader((X, Y), 8, shuffle=True)
EPOCHS, STEPS = 30, len(LOADER)


def squared_error(output, target):
    return ((output - target) ** 2).mean()


class Watching(Callback):
    """Keeps the state after every step and the metrics of every evaluation; calls `act` after step 41."""

    def __init__(self, act=lambda: None):
        super().__init__()
        self._act = act

    def reset(self) -> None:
        self.states: dict[int, Any] = {}
        self.losses: dict[int, float] = {}

    def on_step_end(self, event):
        self.states[event.step] = jax.tree.map(np.array, event.state)
        if event.step == 41:
            self._act()

    def on_validation_epoch_end(self, eval_metrics, epoch):
        self.losses[self.event.step] = float(eval_metrics["val/loss"])


def trained(folder, watching, test_ds=None):
    with fault(SLOWLY):
        fit(
            nn.Dense(1, kernel_init=nn.initializers.zeros),
            LOADER,
            test_ds,
            loss_fn=squared_error,
            optimizer=optax.adam(0.03),
            num_epochs=EPOCHS,
            callbacks=[watching],
            log_dir=folder,
            progress=False,
            tensorboard=False,
        )


def store_in(folder, **options):
    [found] = folder.glob("**/checkpoints")
    return CheckpointStore(found, **options)


def stop():
    raise StopTraining("enough")


def fail():
    raise OSError("the loader is gone")


ENDS = {
    "completed": (lambda: None, None, EPOCHS * STEPS),
    "stopped": (stop, None, 41),
    "failed": (fail, OSError, 41),
    "Ctrl-C": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, 41),
    "SIGTERM": (lambda: signal.raise_signal(signal.SIGTERM), SystemExit, 41),
}


def test_the_last_state_is_on_disk_however_a_run_ends(tmp_path_factory: pytest.TempPathFactory):
    for act, error, last in ENDS.values():
        with noted_row(act, error, last):
            tmp_path = tmp_path_factory.mktemp("row")
            watching = Watching(act)
            if error is None:
                trained(tmp_path, watching)
            else:
                with pytest.raises(error):
                    trained(tmp_path, watching)
            restored, saved = store_in(tmp_path).restore("latest", watching.states[last])
            assert saved.step == last
            assert_same_bits(restored, watching.states[last])


def test_the_best_and_the_two_latest_are_left_each_with_its_own_weights_and_metric(tmp_path):
    watching = Watching()
    trained(tmp_path, watching, ArrayLoader((X, Y / 2), 8))  # the best weights come on the way to those of training
    best = min(watching.losses, key=watching.losses.__getitem__)
    assert STEPS < best < (EPOCHS - 4) * STEPS
    store = store_in(tmp_path, monitor="val/loss")
    assert store.steps() == [best, (EPOCHS - 1) * STEPS, EPOCHS * STEPS]
    for saved in store.all():
        like = watching.states[saved.step]
        assert saved.metrics["val/loss"] == watching.losses[saved.step]
        assert_same_bits(store.restore(saved, like, only=("params",))[0].params, like.params)
    found = store.best()
    assert found is not None and found.step == best
