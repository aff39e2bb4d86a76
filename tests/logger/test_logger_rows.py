import json
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.logger.rows import drop_rows_after

EPOCH_1 = [
    {"step": 0, "epoch": 0, "optimizer/lr": 0.1},
    {"step": 0, "epoch": 1, "optimizer/lr": 0.1},
    {"step": 2, "epoch": 1, "train/loss_step": 0.5},
    {"step": 4, "epoch": 1, "train/loss_epoch": 0.4, "train/time_epoch": 1.0},
    {"step": 4, "epoch": 1, "val/loss": 0.3, "val/time": 1.0},
]
EPOCH_2 = [
    {"step": 4, "epoch": 2, "optimizer/lr": 0.05},
    {"step": 6, "epoch": 2, "train/loss_step": 0.5},
    {"step": 8, "epoch": 2, "val/loss": "nan", "val/time": 1.0},
]
TEST = {"step": 8, "epoch": 2, "test_far/loss": 0.3, "test_far/time": 1.0}


def left(folder: Path, lines: list[Any], *, step: int, epoch: int, end: str = "\n") -> list[Any]:
    """What is left of these rows, or lines."""
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    drop_rows_after(file, step, epoch)
    assert [entry.name for entry in folder.iterdir()] == ["metrics.jsonl"]
    assert file.read_text() == "" or file.read_text().endswith("}\n")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_later_rows_go_and_earlier_ones_stay(tmp_path):
    assert left(tmp_path, [*EPOCH_1, *EPOCH_2], step=4, epoch=1) == EPOCH_1
    assert left(tmp_path, [*EPOCH_1, *EPOCH_2], step=8, epoch=2) == [*EPOCH_1, *EPOCH_2]
    assert left(tmp_path, [*EPOCH_1, *EPOCH_2], step=6, epoch=2) == [*EPOCH_1, *EPOCH_2[:2]]
    assert left(tmp_path, [*EPOCH_1, *EPOCH_2], step=0, epoch=0) == EPOCH_1[:1]


def test_a_test_came_after_the_checkpoint_of_its_own_step(tmp_path):
    assert left(tmp_path, [*EPOCH_1, *EPOCH_2, TEST], step=8, epoch=2) == [*EPOCH_1, *EPOCH_2]


def test_a_metric_that_is_only_called_like_a_test_is_none(tmp_path):
    row = {"step": 8, "epoch": 2, "testing/loss_epoch": 0.3, "train/time_epoch": 1.0}
    assert left(tmp_path, [row], step=8, epoch=2) == [row]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize(
    "torn", ['{"step": 6, "epo', '{"step": 4', "{", "6", '{"epoch": 2}', "\0\0\0", '{"step": "6"}']
)
def test_a_line_that_was_cut_off_goes(tmp_path, torn, end):
    assert left(tmp_path, [*EPOCH_1, torn], step=4, epoch=1, end=end) == EPOCH_1


def test_bytes_that_are_no_text_go(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(json.dumps(TEST).encode() + b'\n{"step": 8\xff\xfe')
    drop_rows_after(file, 9, 2)
    assert json.loads(file.read_text()) == TEST


def test_rows_with_an_axis_of_their_own_stay_or_go_with_those_around_them(tmp_path):
    early, late = {"step": 64_000, "samples/seen": 1.0}, {"step": 1, "patience/left": 2.0}
    lines = [EPOCH_1[0], early, *EPOCH_1[1:], late, EPOCH_2[0], late, *EPOCH_2[1:]]
    assert left(tmp_path, lines, step=4, epoch=1) == [EPOCH_1[0], early, *EPOCH_1[1:], late]


def test_where_nothing_was_written_nothing_is(tmp_path):
    drop_rows_after(tmp_path / "metrics.jsonl", 3, 1)
    assert not list(tmp_path.iterdir())


def test_the_record_goes_on_where_it_was_cut(tmp_path):
    left(tmp_path, [*EPOCH_1, '{"step": 6'], step=4, epoch=1, end="")
    logger = Logger(LoggerConfig(), tmp_path)
    logger.write(6, {"epoch": 2, "train/loss_step": 0.5})
    logger.close("completed")
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [*EPOCH_1, EPOCH_2[1]]
