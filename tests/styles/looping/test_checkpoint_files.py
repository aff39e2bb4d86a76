"""What writers save, readers give back; the best stays the best, and nothing is lost by the way."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.core.failpoints import arm
from jax_trainer.engine import is_by_ctrl_c
from jax_trainer.styles.checkpoints import (
    Checkpoint,
    CheckpointFileReader,
    CheckpointFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
    Summary,
    state_of,
    summarised,
)
from jax_trainer.styles.loop_tasks import TrainTask
from jax_trainer.styles.looping import TrainLoop
from jax_trainer.testing import assert_same_bits

X = np.arange(12, dtype=np.float32).reshape(2, 2, 3) / 10
BATCHES = [(x, x.sum(-1)) for x in X]


def init(rngs: dict[str, jax.Array], x: jax.Array) -> dict[str, Any]:
    return {"params": jnp.zeros(x.shape[-1])}


def loop_from(start: Any) -> TrainLoop:
    task = TrainTask(
        apply=lambda variables, x: x @ variables["params"],
        optimizer=optax.sgd(0.1, momentum=0.9),
        loss=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
        data=BATCHES,
    )
    return TrainLoop(init=start, task=task, n_steps=6, stdout=False)


@pytest.fixture(scope="module")
def checkpoints() -> dict[int, Checkpoint]:
    """By step."""
    return {checkpoint.step: checkpoint for checkpoint in loop_from(init)}


def evaluated(checkpoint: Checkpoint, value: float) -> Summary:
    return summarised(checkpoint, "eval", {"score": value})


def begun_with(reader: Any) -> tuple[int, Any]:
    """The step that a loop begins with, and its weights."""
    loop = loop_from(reader)
    return loop.step, loop._steps.params


def test_the_reader_gives_the_newest_that_the_writer_saved(checkpoints: dict[int, Checkpoint], tmp_path: Path, capsys):
    writer = CheckpointFileWriter(output_dir=tmp_path)
    for step in (2, 4):
        assert writer(checkpoints[step]) is checkpoints[step]
    loop = loop_from(CheckpointFileReader(dir=str(tmp_path), target=init))
    assert_same_bits(loop._steps.params, checkpoints[4].model_params)
    *_, last = loop
    assert_same_bits((last.model_params, last.optimizer_state), _learnt(checkpoints[6]))


def test_where_the_loop_stood_in_its_data_is_saved_as_well(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    CheckpointFileWriter(tmp_path)(checkpoints[3])
    found = CheckpointFileReader(tmp_path, init).read(state_of(checkpoints[3]))
    assert found is not None
    state, loop_state = found
    assert_same_bits(state, state_of(checkpoints[3]))
    assert loop_state == checkpoints[3].loop_state


def _learnt(checkpoint: Checkpoint) -> Any:
    return checkpoint.model_params, checkpoint.optimizer_state


def test_where_nothing_was_saved_a_loop_begins_with_its_first_step(tmp_path: Path):
    for reader in (
        CheckpointFileReader(tmp_path / "nowhere", init),
        LowestCheckpointFileReader(tmp_path, init, metric="score"),
        HighestCheckpointFileReader(tmp_path, init, "score", "train"),
    ):
        assert begun_with(reader)[0] == 0
    assert not list(tmp_path.iterdir())


def test_the_configured_number_of_latest_checkpoints_is_kept(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    for keep in (1, 3):
        writer = CheckpointFileWriter(tmp_path / str(keep), keep=keep)
        for checkpoint in checkpoints.values():
            writer(checkpoint)
        names = sorted(path.name for path in (tmp_path / str(keep) / "regular").glob("step_*"))
        assert names == [f"step_{step:08d}" for step in range(7 - keep, 7)]


def test_a_new_run_replaces_the_later_steps_of_another_with_a_warning(
    checkpoints: dict[int, Checkpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    writer, reader = CheckpointFileWriter(tmp_path), CheckpointFileReader(tmp_path, init)
    writer(checkpoints[5])
    CheckpointFileWriter(tmp_path)(checkpoints[2])
    assert "step 2 replaces another run's step 5" in caplog.text
    assert begun_with(reader)[0] == 2
    writer(checkpoints[3])
    assert begun_with(reader)[0] == 3
    assert len(list((tmp_path / "regular").glob("step_*"))) == 1


def test_a_step_can_be_saved_again(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    writer = CheckpointFileWriter(tmp_path)
    writer(checkpoints[2])
    writer(replace(checkpoints[3], step=2))
    assert_same_bits(begun_with(CheckpointFileReader(tmp_path, init))[1], checkpoints[3].model_params)


def test_without_overwriting_the_same_or_a_later_step_is_an_error(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    CheckpointFileWriter(tmp_path)(checkpoints[3])
    careful = CheckpointFileWriter(tmp_path, overwrite=False)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="step 3"):
            careful(checkpoints[step])
    careful(checkpoints[4])
    assert begun_with(CheckpointFileReader(tmp_path, init))[0] == 4


BEST = {
    "lowest": (LowestCheckpointFileWriter, LowestCheckpointFileReader, 1.0),
    "highest": (HighestCheckpointFileWriter, HighestCheckpointFileReader, -1.0),
}


@pytest.fixture(params=list(BEST))
def best(request: pytest.FixtureRequest) -> Any:
    return BEST[request.param]


def test_only_the_best_is_saved_and_ties_are_not(best: Any, checkpoints: dict[int, Checkpoint], tmp_path: Path):
    writing, reading, sign = best
    writer, reader = writing(output_dir=tmp_path, metric="score"), reading(tmp_path, init, "score")
    for step, value in {1: 3.0, 2: 2.0, 3: 2.0, 4: float("nan"), 5: 2.5}.items():
        summary = evaluated(checkpoints[step], sign * value)
        assert writer(summary) is summary
    step, weights = begun_with(reader)
    assert step == 2
    assert_same_bits(weights, checkpoints[2].model_params)
    assert [path.name for path in tmp_path.rglob("step_*")] == ["step_00000002"]


def test_a_best_value_of_zero_is_remembered(best: Any, checkpoints: dict[int, Checkpoint], tmp_path: Path, capsys):
    writing, reading, sign = best
    writing(tmp_path, "score")(evaluated(checkpoints[2], 0.0))
    assert not capsys.readouterr().out
    again = writing(tmp_path, "score")
    word = "lowest" if sign > 0 else "highest"
    expected = f"The {word} value for the metric eval/score is set to 0.00000000.\n"
    assert capsys.readouterr().out == expected
    again(evaluated(checkpoints[3], sign * 0.5))
    assert [path.name for path in tmp_path.rglob("step_*")] == ["step_00000002"]
    assert begun_with(reading(tmp_path, init, "score"))[0] == 2
    writing(tmp_path, "score", stdout=False)(evaluated(checkpoints[4], sign * -0.5))
    assert begun_with(reading(tmp_path, init, "score"))[0] == 4
    assert not capsys.readouterr().out


def test_lowest_highest_and_regular_checkpoints_share_a_folder(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    writers = [CheckpointFileWriter(tmp_path), *(writing(tmp_path, "score") for writing, _, _ in BEST.values())]
    for step, value in {1: 3.0, 2: 1.0, 3: 2.0}.items():
        for writer in writers:
            writer(evaluated(checkpoints[step], value))
    assert begun_with(CheckpointFileReader(tmp_path, init))[0] == 3
    assert begun_with(LowestCheckpointFileReader(tmp_path, init, "score"))[0] == 2
    assert begun_with(HighestCheckpointFileReader(tmp_path, init, "score"))[0] == 1


def test_a_better_run_from_an_earlier_step_takes_the_place_of_the_best(
    checkpoints: dict[int, Checkpoint], tmp_path: Path
):
    LowestCheckpointFileWriter(tmp_path, "score")(evaluated(checkpoints[5], 2.0))
    LowestCheckpointFileWriter(tmp_path, "score")(evaluated(checkpoints[2], 1.0))
    assert begun_with(LowestCheckpointFileReader(tmp_path, init, "score"))[0] == 2


def test_a_metric_of_training_needs_no_evaluation(checkpoints: dict[int, Checkpoint], tmp_path: Path):
    writer = LowestCheckpointFileWriter(tmp_path, metric="loss", group="train")
    for checkpoint in checkpoints.values():
        writer(checkpoint)
    lowest = min(checkpoints.values(), key=lambda checkpoint: checkpoint.loss)
    assert begun_with(LowestCheckpointFileReader(tmp_path, init, "loss", "train"))[0] == lowest.step


def test_checkpoints_without_the_metric_warn_once(
    checkpoints: dict[int, Checkpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    writer = LowestCheckpointFileWriter(tmp_path, metric="score")
    with caplog.at_level(logging.WARNING):
        for checkpoint in checkpoints.values():
            assert writer(checkpoint) is checkpoint
    assert caplog.text.count("`writer(eval_loop(checkpoint))`") == 1
    assert not list(tmp_path.iterdir())


def test_a_summary_without_the_metric_is_an_error_that_names_those_there_are(
    checkpoints: dict[int, Checkpoint], tmp_path: Path
):
    with pytest.raises(ValueError, match="no metric 'eval/scroe'.*eval/score"):
        LowestCheckpointFileWriter(tmp_path, metric="scroe")(evaluated(checkpoints[1], 1.0))


def test_a_metric_cannot_lead_out_of_the_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="evil"):
        LowestCheckpointFileWriter(tmp_path, metric="../../evil")


@pytest.fixture
def ctrl_c():
    """The default handler of Ctrl-C: background jobs may start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    arm(None)


@pytest.mark.usefixtures("ctrl_c")
def test_the_first_ctrl_c_while_a_checkpoint_is_written_finishes_the_write(checkpoints, tmp_path: Path):
    arm("mid_array:sleep=0.6")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match="step 4") as end:
        CheckpointFileWriter(tmp_path)(checkpoints[4])
    assert is_by_ctrl_c(end.value)
    assert begun_with(CheckpointFileReader(tmp_path, init))[0] == 4


@pytest.mark.usefixtures("ctrl_c")
def test_the_second_ctrl_c_while_a_checkpoint_is_written_does_not_wait(checkpoints, tmp_path: Path):
    arm("mid_array:sleep=5")
    for seconds in (0.3, 1.0):  # not of one signal that arrives twice
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt) as end:
        CheckpointFileWriter(tmp_path)(checkpoints[4])
    assert time.perf_counter() - began < 4
    assert not is_by_ctrl_c(end.value)
