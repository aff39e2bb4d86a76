"""What changes during a training changes in every style at the same steps, to the same bits, also after a failure."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_trainer import ArrayLoader
from jax_trainer.callbacks import ReduceLROnPlateauConfig, StochasticWeightAveragingConfig, UnfreezeConfig
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.testing import assert_same_bits, fault
from tests.styles.style_runs import STYLES, Outcome, arrays

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
    options = {"accumulate": {0: 1, 1: 2, 2: 4}}
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


# callbacks that change the training

CHANGES: dict[str, dict[str, Any]] = {
    "unfreezing": {"Unfreeze": UnfreezeConfig(schedule={0: ".*kernel", 1: ".*bias"})},
    "averaging": {"StochasticWeightAveraging": StochasticWeightAveragingConfig(swa_epoch_start=1)},
    "reducing": {"ReduceLROnPlateau": ReduceLROnPlateauConfig(patience=0, threshold=100.0, factor=0.5)},
}
WITHOUT = {"TrainLoop": ("averaging", "reducing")}  # which has neither an end nor evaluations: see `loop.edit`
CASES = [(name, change) for name in STYLES for change in CHANGES if change not in WITHOUT.get(name, ())]
QUICK = {"fit, linen": tuple(CHANGES), "train_fn": ("unfreezing",), "TrainLoop": ("unfreezing",)}
EVERY_CHANGE = pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(*case, marks=() if case[1] in QUICK.get(case[0], ()) else pytest.mark.slow) for case in CASES],
)


def changed(name: str, change: str, folder: Path, *, linear: bool = True, resume: bool = False) -> Outcome:
    style = STYLES[name](folder, linear=linear, epochs=3, total=12, callbacks=CHANGES.get(change, {}))
    return style.train(resume=resume)


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    return cache(lambda name, change: changed(name, change, tmp_path_factory.mktemp("changing")))


@EVERY_CHANGE
def test_a_callback_changes_every_style_in_the_same_way(changing, name, change):
    mine, other = changing(name, change), changing(f"TrainerModule, {STYLES[name].flavour}", change)
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))
    plain = changing(name, "nothing")
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(mine.params), jax.tree.leaves(plain.params), strict=True))


@EVERY_CHANGE
def test_a_change_is_the_same_after_a_failure(changing, name, change, tmp_path):
    with fault("step:raise:8"), pytest.raises(FaultInjected):
        changed(name, change, tmp_path)
    resumed, whole = changed(name, change, tmp_path, resume=True), changing(name, change)
    assert_same_bits((resumed.params, resumed.model_state), (whole.params, whole.model_state))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit, linen", "fit, nnx", "train_fn"])
def test_batchnorm_statistics_are_recomputed_in_every_style(name, tmp_path):
    names = (name, f"TrainerModule, {STYLES[name].flavour}")
    mine, other = (changed(one, "averaging", tmp_path / str(n), linear=False) for n, one in enumerate(names))
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))


def test_a_callback_that_needs_more_than_the_style_has_is_refused(tmp_path_factory, subtests):
    for change in WITHOUT["TrainLoop"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(change=change):
            with pytest.raises(ValueError, match=f"TrainLoop.*{next(iter(CHANGES[change]))}.*loop.edit"):
                changed("TrainLoop", change, tmp_path)
            with pytest.raises(ValueError, match="train_fn.*ModelSummary.*folder"):
                STYLES["train_fn"](tmp_path, linear=True, callbacks={"ModelSummary": None}).train()
