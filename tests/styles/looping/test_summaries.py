"""Reports say what the summary holds, in aligned columns, and TensorBoard gets the same in one file."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.styles.checkpoints import Checkpoint, SummaryLogger, SummaryWriter, summarised
from tests.logger.event_files import scalars_in  # type: ignore[import-not-found] - beside the tests of the logger

WEIGHTS = {"w": np.full(4, 1.0, np.float32)}


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(WEIGHTS, {}, (), WEIGHTS, loss=7.5, n_completed_steps=2, elapsed_time=3.0, step=step)


def test_the_report_has_the_lines_and_columns_of_the_document(capsys: pytest.CaptureFixture[str]):
    summary = summarised(checkpoint(7), "eval", {"lnpp": 5.54795837})
    assert SummaryLogger()(summary) is summary
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Step      7: Ran 2 train steps in 3.00 seconds",
        "Step      7: train seconds_per_step | 1.50000000",
        "Step      7: train gradients_l2norm | 2.00000000",
        "Step      7: train   weights_l2norm | 2.00000000",
        "Step      7: train             loss | 7.50000000",
        "Step      7: eval              lnpp | 5.54795837",
    ]


def test_columns_are_as_wide_as_their_longest_name(capsys: pytest.CaptureFixture[str]):
    SummaryLogger()(summarised(checkpoint(7), "held_out_set", {"a_rather_long_metric": 1.0}))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len({line.index("|") for line in lines}) == 1


def test_a_checkpoint_without_evaluation_is_reported_with_its_training_metrics(capsys: pytest.CaptureFixture[str]):
    SummaryLogger()(checkpoint(7))
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_all_summaries_go_to_one_file_and_are_there_at_once(tmp_path: Path):
    writer = SummaryWriter(output_dir=tmp_path / "board")
    assert not (tmp_path / "board").exists()
    for step in (3, 6):
        summary = summarised(checkpoint(step), "eval", {"lnpp": float(step)})
        assert writer(summary) is summary
        found = scalars_in(tmp_path / "board")
        assert found["eval/lnpp"][-1] == (step, step)
    assert found["train/loss"] == [(3, 7.5), (6, 7.5)]
    assert len(list((tmp_path / "board").iterdir())) == 1
    writer.close()


def test_a_writer_whose_folder_was_removed_closes_without_an_error(tmp_path: Path):
    writer = SummaryWriter(tmp_path / "board")
    writer(checkpoint(7))  # on disk when it returns: closing has nothing to write
    shutil.rmtree(tmp_path / "board")
    writer.close()
