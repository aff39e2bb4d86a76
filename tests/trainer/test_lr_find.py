"""`TrainerModule.lr_find`: the training after it is that without it, to the bit."""

from typing import Any

import numpy as np
import pytest

from jax_trainer.callbacks import ReduceLROnPlateauConfig, UnfreezeConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.testing import assert_same_bits, numbered_loader
from tests.trainer.trainer_runs import EXAMPLE, plain_for, train_plain


def trainer(flavour: str, folder: Any, **changes: Any) -> Any:
    return plain_for(flavour, folder, optimizer=AdamWConfig(learning_rate=1e-3), **changes)


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_training_after_a_sweep_is_that_without_one(flavour, tmp_path):
    swept, plain = (trainer(flavour, tmp_path / name) for name in ("swept", "plain"))
    result = swept.lr_find(numbered_loader(128), num_training=20, min_lr=1e-5, max_lr=1.0)
    assert len(result.losses) <= 20 and np.isfinite(result.losses).all()
    assert not list(tmp_path.iterdir())
    train_plain(swept)
    train_plain(plain)
    assert_same_bits(swept.state, plain.state)
    before = swept.state
    again = swept.lr_find(numbered_loader(128), num_training=20, min_lr=1e-5)  # from the trained weights
    assert again.losses[0] < result.losses[0]
    assert_same_bits(swept.state, before)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "precision": "f16"},
        pytest.param({"ema": 0.9, "detect_nans": True}, marks=pytest.mark.slow),
        {"callbacks": {"a": ReduceLROnPlateauConfig(), "b": UnfreezeConfig(schedule={0: ".*kernel"})}},
    ],
)
def test_it_works_with_what_else_a_trainer_has(tmp_path, options):
    result = trainer("linen", tmp_path, **options).lr_find(numbered_loader(128), num_training=20, min_lr=1e-4)
    assert result.losses[0] > 0 and len(EXAMPLE["x"]) == 32
