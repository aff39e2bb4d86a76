"""What changes during a training changes in every style at the same steps, to the same bits, also after a failure."""

import logging
from functools import cache
from pathlib import Path

import pytest
from style_runs import STYLES, Outcome, arrays

from jax_trainer import ArrayLoader, ProgramOptions
from jax_trainer.testing import FaultInjected, assert_same_bits, fault

SIZES, EXAMPLES, EPOCHS = {0: 16, 1: 32}, 64, 3
TOTAL = 4 + 2 + 2
USUAL = ("fit, linen", "train_fn", "TrainLoop")
EVERY = pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in STYLES]
)


@pytest.fixture(autouse=True)
def quiet_log(caplog):
    caplog.set_level(logging.ERROR, "jax_trainer")


def train_data() -> ArrayLoader:
    return ArrayLoader(arrays(EXAMPLES), SIZES, shuffle=True, seed=3)


def train(name: str, folder: Path, *, resume: bool = False) -> Outcome:
    options = ProgramOptions(accumulate={0: 1, 1: 2, 2: 4})
    style = STYLES[name](folder, options=options, linear=True, epochs=EPOCHS, total=TOTAL)
    return style.train(train_data(), resume=resume)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return cache(lambda name: train(name, tmp_path_factory.mktemp("straight")))


@EVERY
def test_batch_sizes_and_micro_batches_by_epoch_come_to_the_same_bits_in_every_style(straight, name):
    mine, other = straight(name), straight(f"TrainerModule, {STYLES[name].flavour}")
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))


@EVERY
def test_and_after_a_failure(straight, name, tmp_path):
    with fault("step:raise:6"), pytest.raises(FaultInjected):
        train(name, tmp_path)
    assert_same_bits(train(name, tmp_path, resume=True).params, straight(name).params)
