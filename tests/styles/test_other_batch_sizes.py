"""A run that is resumed with another batch size neither repeats nor leaves out examples, in any style."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jax_trainer import ArrayLoader
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import DataError
from jax_trainer.testing import fault
from tests.styles.style_runs import SAVE, STEPS, STYLES, arrays

NAMES = ("TrainerModule, nnx", "fit, linen", "train_fn", "TrainLoop")
EVERY = pytest.mark.parametrize("name", NAMES)
USUAL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fit, linen" else pytest.mark.slow) for name in NAMES]
)
SIZE = 16
CHANGED = ("data", "program", "optimizer")  # by batches of another size; a schedule may be made for their number
IN_EPOCH_2 = 2  # steps that the run took of epoch 2 before it failed


class Loader(ArrayLoader):
    """Remembers where its epochs were opened, and refuses to be opened a second time: what follows is not looked at."""

    def __init__(self, size: int) -> None:
        super().__init__(arrays(SIZE * STEPS), size, shuffle=True, seed=3)
        self.opened: list[tuple[int, int]] = []

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        if (number, start) == (1, 0):  # the example batch
            return super().epoch(number, start)
        self.opened.append((number, start))
        raise InterruptedError

    def examples_behind(self) -> int:
        (number, start), *_ = self.opened
        return (number - 1) * SIZE * STEPS + start * self.batch_size


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The folder of a training that failed in epoch 2, by style; done once for each."""

    @cache
    def kept(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("failed")
        with fault(f"step:raise:{STEPS + IN_EPOCH_2}"), pytest.raises(FaultInjected):
            STYLES[name](folder / "run", linear=True).train()
        return shutil.copytree(folder / "run", folder / "kept"), folder / "run"

    def folder(name: str) -> Path:
        kept_at, place = kept(name)
        shutil.rmtree(place)
        return shutil.copytree(kept_at, place)  # at the same place, as some find it by that

    return folder


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR", "jax_trainer")


@EVERY
@pytest.mark.parametrize(
    "size", [SIZE // 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (SIZE, SIZE * 2))]
)
def test_a_resume_in_the_middle_of_an_epoch_counts_examples(name, size, failed):
    loader = Loader(size)
    with pytest.raises(InterruptedError):
        STYLES[name](failed(name), linear=True).train(loader, resume=True, allow=CHANGED)
    assert loader.examples_behind() == (STEPS + IN_EPOCH_2) * SIZE


@EVERY
def test_a_batch_size_that_does_not_fit_the_position_is_refused(name, failed):
    loader = Loader(12)
    with pytest.raises(DataError, match=r"epoch 2.*2 batches of 16.*have 12.*batches of 16.*divides 32.*end of"):
        STYLES[name](failed(name), linear=True).train(loader, resume=True, allow=CHANGED)
    assert not loader.opened


@USUAL
def test_batches_from_a_list_are_refused_in_another_size(name, tmp_path):
    folder = tmp_path / "run"
    with fault(f"step:raise:{SAVE}"), pytest.raises(FaultInjected):
        STYLES[name](folder, linear=True).train(list(ArrayLoader(arrays(SIZE * STEPS), SIZE).epoch(1)))
    with pytest.raises(DataError, match="3 batches of 16.*have 8.*end of"):
        STYLES[name](folder, linear=True).train(
            list(ArrayLoader(arrays(SIZE * STEPS), SIZE // 2).epoch(1)), resume=True, allow=CHANGED
        )


@USUAL
def test_batches_of_a_function_are_refused_in_another_size(name, tmp_path):
    folder, batches = tmp_path / "run", lambda size: lambda: ArrayLoader(arrays(SIZE * STEPS), size).epoch(1)
    with fault(f"step:raise:{SAVE}"), pytest.raises(FaultInjected):
        STYLES[name](folder, linear=True).train(batches(SIZE))
    with pytest.raises(DataError, match="3 batches of 16.*have 8.*end of"):
        STYLES[name](folder, linear=True).train(batches(SIZE // 2), resume=True, allow=CHANGED)
    STYLES[name](folder, linear=True).train(batches(SIZE), resume=True)
