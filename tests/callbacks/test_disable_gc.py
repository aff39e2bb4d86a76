import gc

import pytest

from jax_trainer.callbacks import DisableGC, DisableGCConfig, LambdaCallback
from jax_trainer.engine import Plan, StopTraining
from jax_trainer.testing import fault
from tests.callbacks.callback_runs import fit


def stop(*given: object) -> None:
    raise StopTraining


@pytest.fixture(autouse=True)
def _collector():
    before = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if before else gc.disable()


@pytest.mark.parametrize("ending", [pytest.param("completed", marks=pytest.mark.slow), "stopped", "failed"])
def test_the_collector_is_off_while_training_and_on_again_however_it_ends(ending):
    seen: list[bool] = []
    watcher = LambdaCallback(on_step_end=lambda event: seen.append(gc.isenabled()))
    last = LambdaCallback(**({"on_training_epoch_end": stop} if ending == "stopped" else {}))
    if ending == "failed":
        with fault("step:raise:2"), pytest.raises(Exception, match="step"):
            fit(DisableGC(), watcher, last)
    else:
        fit(DisableGC(), watcher, last)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    fit(DisableGC(), plan=Plan(max_steps=1))
    assert not gc.isenabled()


@pytest.mark.parametrize(
    ("every", "collections"),
    [pytest.param(1, 4, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow), (0, 0)],
)
def test_garbage_is_collected_at_the_end_of_epochs(every, collections):
    found: list[int] = []
    gc.callbacks.append(note := lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
    try:
        fit(DisableGC(DisableGCConfig(every_n_epochs=every)), plan=Plan(max_epochs=4))
    finally:
        gc.callbacks.remove(note)
    assert len([generation for generation in found if generation == 2]) >= collections
    assert found.count(2) <= collections + 1  # one may come before training
