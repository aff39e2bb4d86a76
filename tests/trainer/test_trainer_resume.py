import errno
import os
import signal
import sys
from typing import Any

import pytest

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.diagnostics.files import LineFile
from jax_trainer.runs import OtherRunError
from jax_trainer.testing import assert_same_bits, fault
from tests.trainer.trainer_runs import STEPS, Plain, callbacks, plain_for, rows, train, train_plain, trainer_for, values


def crashed(done, folder, *steps: int, **changes):
    """A run like `done` that broke down after so many steps, was resumed, and broke down again, …; not resumed yet."""
    run_folder = None
    for number, steps_taken in enumerate(steps):
        trainer = trainer_for(done.flavour, folder, callbacks=callbacks(), run_folder=run_folder, **changes)
        with fault(f"step:raise:{steps_taken}"), pytest.raises(FaultInjected):
            train(trainer, resume=number > 0)
        assert trainer.folder is not None
        run_folder = RunFolder.open(trainer.folder.path)  # as another process would find it
    return trainer_for(done.flavour, folder, callbacks=callbacks(), run_folder=run_folder, **changes)


@pytest.mark.parametrize("done", ["linen", pytest.param("nnx", marks=pytest.mark.slow)], indirect=True)
def test_a_run_that_crashed_three_times_resumes_to_the_same_bits_and_rows(done, tmp_path):
    trainer = crashed(done, tmp_path, 2 * STEPS + 1, 1, 3)  # nothing is lost: it resumes after the last step
    results = train(trainer, resume=True)
    assert_same_bits(trainer.state, done.trainer.state)
    assert rows(trainer) == rows(done.trainer)
    assert list(values(trainer, "optimizer/lr")) == list(values(done.trainer, "optimizer/lr"))
    assert results == done.results
    assert len(list(tmp_path.iterdir())) == 1  # in the same folder


def test_the_record_is_complete_after_the_disk_was_full_and_is_free_again(done, tmp_path, monkeypatch):
    append = LineFile.append

    def full(self: LineFile, lines: Any, **options: Any) -> None:
        if self.path.name == "metrics.jsonl" and lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, lines, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", full)
        trainer = crashed(done, tmp_path, 2 * STEPS + 1)
    assert trainer.folder.metrics_file.read_text() == ""
    train(trainer, resume=True)
    assert rows(trainer) == rows(done.trainer)


def test_it_resumes_in_the_middle_of_an_epoch(done, tmp_path):
    trainer = crashed(done, tmp_path, 11, val_every_n_steps=3, check_val_every_n_epoch=0)
    assert (trainer.folder.checkpoints / "step_00000009").is_dir()  # 1 step into the third epoch
    train(trainer, resume=True)
    assert (trainer.folder.checkpoints / "step_00000015").is_dir()
    assert_same_bits(trainer.state, done.trainer.state)


def test_an_interrupted_run_resumes_with_the_same_trainer(done, tmp_path):
    trainer = trainer_for(done.flavour, tmp_path, callbacks=callbacks(interrupt_at=2 * STEPS + 1))
    with pytest.raises(KeyboardInterrupt) as end:
        train(trainer)
    assert int(trainer.state.step) == 2 * STEPS + 1
    call = f"step {2 * STEPS + 1} with `train_model(…, resume={str(trainer.folder.path)!r})`"
    assert call in str(end.value) and end.value.__suppress_context__
    reached = end.value.result  # type: ignore[attr-defined]
    assert (reached.status, [one.step for one in reached.validations]) == ("interrupted", [STEPS, 2 * STEPS])
    assert "Run interrupted" in (trainer.folder.path / "run.log").read_text()
    trainer.config.callbacks["watcher"].interrupt_at = 0
    with fault("step:raise:2"), pytest.raises(FaultInjected):  # after which its state is gone
        train(trainer, resume=True)
    train(trainer, resume=True)
    assert_same_bits(trainer.state, done.trainer.state)


def test_a_run_that_is_done_is_only_tested_again(done, tmp_path):
    trainer = trainer_for(done.flavour, tmp_path, callbacks=callbacks())
    first = train(trainer)
    again = trainer_for(done.flavour, tmp_path, callbacks=callbacks(), run_folder=trainer.folder)
    assert train(again, resume=True) == first
    assert_same_bits(again.state, done.trainer.state)
    assert rows(again) == rows(done.trainer)


def test_a_longer_plan_resumes_where_the_shorter_one_ended(tmp_path):
    saver = {"saver": ModelCheckpointConfig()}
    straight = plain_for("nnx", tmp_path, train_epochs=3, callbacks=saver)
    train_plain(straight)
    short = plain_for("nnx", tmp_path, train_epochs=1, callbacks=saver)
    train_plain(short)
    assert list(train_plain(short, num_epochs=3, resume=True)) == [1, 2, 3]
    assert_same_bits(short.state, straight.state)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(OtherRunError, match="resume='auto'"):
        train_plain(plain_for("nnx", tmp_path), resume=True)
    unsaved = plain_for("nnx", tmp_path)
    train_plain(unsaved)
    before = unsaved.folder.metrics_file.read_bytes()
    with pytest.raises(CheckpointError, match="has no checkpoint.*ModelCheckpoint"):
        train_plain(unsaved, resume=True)
    assert unsaved.folder.metrics_file.read_bytes() == before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_the_first_step_is_one_line(tmp_path, capsys):
    class Slow(Plain):
        def init_model(self, exmp_input: Any) -> Any:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="before the first step.*Nothing was saved") as caught:
        train_plain(plain_for("nnx", tmp_path, kind=Slow))
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    assert capsys.readouterr().err == f"{caught.value}\n"
