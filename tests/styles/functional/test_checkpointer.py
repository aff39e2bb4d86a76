import itertools
import logging
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from jax_trainer.runs import OtherRunError
from jax_trainer.styles.checkpointer import get_default_checkpointer
from jax_trainer.styles.hooks import get_ema_hook
from jax_trainer.testing import assert_same_bits, fault
from tests.styles.functional.functional_runs import (
    TX,
    Calls,
    Net,
    Trained,
    arrays,
    data,
    fresh,
    straight,
    train_step,
    trained,
)


def steps_in(folder: Path) -> list[int]:
    return CheckpointStore(folder).steps()


class Session:
    """A training as a script has it that is started again and again: everything is new but the folder."""

    def __init__(self, folder: Path | str, save_every: int = 3) -> None:
        self.subject: Trained = fresh()
        self.save, self.restore_best, self.restore_last = get_default_checkpointer(
            folder, save_every_n_steps=save_every
        )
        ema, self.ema_model = get_ema_hook(self.subject[0], 0.8)
        self.calls = Calls(2)
        self.hooks = [self.calls, self.save, ema]

    def go(self, **options: Any) -> None:
        self.restore_last(*self.subject)
        trained(self.subject, hooks=self.hooks, **options)

    @property
    def result(self) -> Any:
        return arrays(self.subject), jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(self.ema_model(), nnx.Param)))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Path]:
    """The training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("complete") / "checkpoints"
    session = Session(folder)
    session.go()
    return session, folder


def test_saving_changes_nothing(complete):
    assert_same_bits(complete[0].result[0], straight())


def interrupted(folder: Path, at: int) -> Session:
    """A session that Ctrl-C ends after step `at`."""
    session = Session(folder)

    def hook(step: int, **kwargs: Any) -> None:
        if step == at:
            signal.raise_signal(signal.SIGINT)

    session.hooks.append(hook)
    with pytest.raises(KeyboardInterrupt):
        session.go()
    return session


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 5])  # an evaluation, a step of nothing; both in the middle of an epoch
def test_an_interrupted_training_resumes_to_the_same_bits(complete, tmp_path, at):
    first = interrupted(tmp_path, at)
    saved = CheckpointStore(tmp_path).latest()
    assert saved is not None
    assert saved.step == at
    assert CheckpointStore(tmp_path).verify(saved.path) == ""
    second = Session(tmp_path)
    second.go()
    assert_same_bits(second.result, complete[0].result)
    assert {**first.calls.metrics, **second.calls.metrics} == complete[0].calls.metrics  # with the same metrics
    assert not first.calls.metrics.keys() & second.calls.metrics.keys()


class Interrupting:
    """Batches for evaluations, in the first of which Ctrl-C comes."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Any:
        self.times += 1
        if self.times == 2:  # before, only the first batch is looked at
            signal.raise_signal(signal.SIGINT)
        yield from data()


def test_an_evaluation_that_was_interrupted_is_made_again_and_hooks_come_after_it(complete, tmp_path):
    first, second = Session(tmp_path), Session(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.go(val=Interrupting())
    assert list(first.calls.metrics) == [2]
    second.go()
    assert_same_bits(second.result, complete[0].result)
    assert {**first.calls.metrics, **second.calls.metrics} == complete[0].calls.metrics


def test_a_training_that_is_made_longer_equals_a_long_one(complete, tmp_path):
    session = Session(tmp_path)
    session.go(n_steps=7)
    trained(session.subject, hooks=session.hooks)  # in the same process, and nothing is restored
    assert_same_bits(session.result, complete[0].result)


def test_the_best_and_the_latest_are_kept_and_restored(complete):
    session, folder = complete
    assert steps_in(folder) == [9, 10]  # 3, 6 and 9 have no validation loss; so the best is the last
    model, optimizer = fresh()
    assert session.restore_best(model, optimizer) == (model, optimizer)
    assert_same_bits(arrays((model, optimizer)), straight())


def test_the_best_is_the_one_with_the_lowest_loss_of_its_own_step(tmp_path):
    losses = {2: 0.5, 4: 0.1, 6: 0.7, 8: 0.9}

    def evaluated(model: Any, rng_key: Any, batch: Any) -> Any:
        return {"loss": _of_count(losses, model.count[...])}

    def counting(model: Any, rng_key: Any, batch: Any) -> Any:
        model.count[...] += 1
        return train_step(model, rng_key, batch)

    def counter() -> Trained:
        model: Any = Net(nnx.Rngs(0))
        model.count = nnx.Variable(jax.numpy.zeros((), jax.numpy.int32))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    save, restore_best, restore_last = get_default_checkpointer(tmp_path, save_every_n_steps=1, max_to_keep=1)
    trained(counter(), n_steps=8, fns=(counting, evaluated), hooks=[save], eval_every_n_steps=2)
    assert steps_in(tmp_path) == [4, 7, 8]
    best, last = counter(), counter()
    restore_best(*best)
    restore_last(*last)
    assert (int(best[1].step.get_value()), int(best[0].count[...])) == (4, 4)
    assert int(last[1].step.get_value()) == 8
    going_on = get_default_checkpointer(tmp_path, save_every_n_steps=1, max_to_keep=1)[0]  # another one
    trained(best, n_steps=6, fns=(counting, evaluated), hooks=[going_on], eval_every_n_steps=2)
    assert steps_in(tmp_path) == [4, 5, 6]


def _of_count(values: dict[int, float], count: Any) -> Any:
    return sum(jax.numpy.where(count == step, value, 0.0) for step, value in values.items())


def test_a_relative_folder_is_fine_and_an_optimizer_that_knows_its_model_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save, _, restore_last = get_default_checkpointer("checkpoints", save_every_n_steps=2)
    monkeypatch.chdir("/")
    trained(n_steps=2, hooks=[save])
    assert steps_in(tmp_path / "checkpoints") == [2]
    model = Net(nnx.Rngs(1))
    optimizer = nnx.ModelAndOptimizer(model, TX)
    assert restore_last(optimizer) is optimizer
    assert_same_bits(arrays((model, optimizer)), arrays(trained(n_steps=2)))


def test_without_a_checkpoint_restoring_warns_and_changes_nothing(tmp_path, caplog):
    subject = fresh()
    _, restore_best, restore_last = get_default_checkpointer(tmp_path / "none", save_every_n_steps=2)
    assert restore_best(*subject) == restore_last(*subject) == subject
    assert_same_bits(arrays(subject), arrays(fresh()))
    assert caplog.text.count(f"checkpoint in {tmp_path / 'none'}") == 2
    with pytest.raises(TypeError, match="model.*nnx.Optimizer"):
        restore_last(subject[0])


def test_two_trainings_are_not_mixed_in_one_folder(complete):
    session, folder = complete
    save, *_ = get_default_checkpointer(folder, save_every_n_steps=3)
    with pytest.raises(CheckpointError, match=r"step 10.* step 0"):
        trained(hooks=[save])
    changed = fresh()
    session.restore_last(*changed)
    changed[0].out.bias[...] += 1
    with pytest.raises(CheckpointError, match="starts at step 10"):
        trained(changed, n_steps=12, hooks=[save])
    assert steps_in(folder) == [9, 10]


def test_another_key_is_refused_unless_it_is_allowed(complete, tmp_path, caplog):
    session = Session(tmp_path)
    session.go(n_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.styles.functional.functional_runs.KEY", jax.random.key(7))
        with pytest.raises(OtherRunError, match=r"random key.*allow_changes=\('start',\)"):
            trained(session.subject, n_steps=4, hooks=session.hooks)
        trained(session.subject, n_steps=4, hooks=session.hooks, allow_changes=("start",))
    assert "random key" in caplog.text


def test_a_criterion_that_cannot_be_compared_is_reported_before_training(tmp_path, caplog):
    save, *_ = get_default_checkpointer(tmp_path / "a", save_every_n_steps=2, criterion_key="val/f1")
    with pytest.raises(ValueError, match=r"`criterion_key` is 'val/f1'.*val/acc, val/loss"):
        trained(hooks=[save])
    assert not (tmp_path / "a").exists()
    save, *_ = get_default_checkpointer(tmp_path / "c", save_every_n_steps=2)
    trained(n_steps=2, hooks=[save], val=None)
    assert "`criterion_key='val/loss'`" in caplog.text
    with pytest.raises(ValueError, match="`save_every_n_steps` must be .* of at least 1, got 0"):
        get_default_checkpointer(tmp_path, save_every_n_steps=0)


def test_the_hook_saves_in_another_loop_as_well(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jax_trainer")
    save, restore_best, restore_last = get_default_checkpointer(tmp_path, save_every_n_steps=2)
    model, optimizer = fresh()
    for step, loss in zip(range(1, 6), itertools.count(), strict=False):
        model.out.bias[...] = np.full(4, step, np.float32)
        optimizer.step[...] += 1
        save(step, model=model, optimizer=optimizer, metrics={"val/loss": loss})
    best, last = fresh(), fresh()
    restore_last(*last)
    restore_best(*best)
    assert (float(best[0].out.bias[0]), float(last[0].out.bias[0])) == (2.0, 4.0)
    assert (int(best[1].step.get_value()), int(last[1].step.get_value())) == (2, 4)
    assert "Restored step 4 from" in caplog.text


def test_restoring_waits_for_the_save_that_is_running(tmp_path_factory, caplog, subtests):
    for which in ["restore_best", "restore_last"]:
        for restoring in ["the same checkpointer", "another one of the same folder"]:
            tmp_path = tmp_path_factory.mktemp("case")
            caplog.clear()
            with subtests.test(which=which, restoring=restoring):
                first = get_default_checkpointer(tmp_path, save_every_n_steps=1)
                other = (
                    first
                    if restoring == "the same checkpointer"
                    else get_default_checkpointer(tmp_path, save_every_n_steps=1)
                )
                model, optimizer = fresh()
                model.out.bias[...] = np.full(4, 7, np.float32)
                with fault("before_manifest:sleep=0.3"):
                    first[0](1, model=model, optimizer=optimizer, metrics={"val/loss": 0.5})
                    restored = (other[1] if which == "restore_best" else other[2])(*fresh())
                assert_same_bits(arrays(restored)[0], arrays((model, optimizer))[0])
                assert not caplog.text


def test_restoring_raises_the_error_of_a_save_that_failed(tmp_path):
    save, _, restore_last = get_default_checkpointer(tmp_path, save_every_n_steps=1)
    model, optimizer = fresh()
    with fault("before_manifest:raise"):
        save(1, model=model, optimizer=optimizer)
        with pytest.raises(SaveError, match=f"step 1 .*{tmp_path}"):
            restore_last(model, optimizer)


JOB = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    from test_checkpointer import Session

    session = Session({folder!r})

    def kill(step, **kwargs):
        if step == {at}:
            session.save._store.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    session.hooks.append(kill)
    session.go()
"""


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_weights(complete, tmp_path):
    for at in (5, 8):
        script = JOB.format(here=str(Path(__file__).parent), folder=str(tmp_path), at=at)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert max(steps_in(tmp_path)) == at - at % 3
    last = Session(tmp_path)
    last.go()
    assert_same_bits(last.result, complete[0].result)
    assert min(last.calls.metrics) == 8


def test_a_folder_whose_checkpoints_are_all_damaged_is_an_error_and_not_a_new_training(tmp_path):
    Session(tmp_path).go()
    for record in tmp_path.glob("*/checkpoint.json"):
        record.write_text("{")
    for name in ("restore_best", "restore_last"):
        session = Session(tmp_path)
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            getattr(session, name)(*session.subject)
