import json
import logging
import os
from pathlib import Path

import pytest

from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.logger.jsonl import cut, last_row
from tests.rows import noted_row

ROWS = [
    {"step": 0, "epoch": 0, "optimizer/lr": 0.1},
    {"step": 4, "epoch": 1, "train/loss_step": 0.5},
    {"step": 8, "epoch": 2, "val/loss": "nan"},
]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]


def written(folder: Path, *lines: bytes) -> Path:
    file = folder / "metrics.jsonl"
    file.write_bytes(b"".join(lines))
    return file


def test_rows_after_the_checkpoint_are_cut_off(tmp_path_factory: pytest.TempPathFactory, caplog):
    for torn in [b"", b'{"step": 12, "epo', b"\0\xff\n"]:
        for kept in range(4):
            with noted_row(torn, kept):
                tmp_path = tmp_path_factory.mktemp("row")
                caplog.clear()
                file, before = written(tmp_path, *LINES, torn), b"".join(LINES[:kept])
                cut(file, len(before))
                assert file.read_bytes() == before
                assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
                assert not caplog.records


def test_a_cut_is_on_the_disk(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append(os.fstat(number).st_size))
    cut(written(tmp_path, *LINES), len(LINES[0]))
    assert sizes == [len(LINES[0])]


def test_a_file_that_does_not_fit_the_checkpoint_stays_as_it_is_with_one_warning(
    tmp_path_factory: pytest.TempPathFactory, caplog
):
    for size, text in [
        (None, "has no position in the checkpoint"),
        (10_000, "has no line that ends after 10000 bytes"),
        (len(LINES[0]) + 3, f"has no line that ends after {len(LINES[0]) + 3} bytes"),
    ]:
        with noted_row(size, text):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            file = written(tmp_path, *LINES)
            with caplog.at_level(logging.WARNING, "jax_trainer"):
                cut(file, size)
            assert file.read_bytes() == b"".join(LINES)
            assert text in caplog.text
            assert "not truncated" in caplog.text
            assert len(caplog.records) == 1


def test_a_file_that_is_gone_costs_a_warning_if_it_had_anything(tmp_path_factory: pytest.TempPathFactory, caplog):
    for size, warnings in [(None, 0), (0, 0), (7, 1)]:
        with noted_row(size, warnings):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            cut(tmp_path / "metrics.jsonl", size)
            assert not list(tmp_path.iterdir())
            assert len(caplog.records) == warnings


def test_the_record_continues_where_it_was_cut(tmp_path):
    cut(written(tmp_path, *LINES, b'{"step"'), len(LINES[0]))
    logger = Logger(LoggerConfig(), tmp_path)
    logger.write(4, {"epoch": 1, "train/loss_step": 0.5})
    logger.close("completed")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(LINES[:2])


def test_a_resumed_run_that_logs_no_row_knows_its_last_step(tmp_path):
    picture = b'{"step": 2, "media": {"val/x": "media/val_x_2.png"}}\n'
    written(tmp_path, *LINES, picture)
    logger = Logger(LoggerConfig(), tmp_path)
    logger.log_hparams({"lr": 0.1}, {"val/loss": 0.5})
    logger.close("completed")
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"step": 8, "hparams": {"lr": 0.1}, "metrics": {"val/loss": 0.5}}


def test_without_a_row_the_last_step_is_0(tmp_path_factory: pytest.TempPathFactory):
    for lines in [[], [b'{"step'], [b"7\n", b'{"step": "x"}\n'], [b"\xff\xfe\n"]]:
        with noted_row(lines):
            tmp_path = tmp_path_factory.mktemp("row")
            assert last_row(tmp_path / "metrics.jsonl") == {"step": 0}
            assert last_row(written(tmp_path, *lines)) == {"step": 0}


def test_the_last_step_is_found_at_the_end_of_a_long_record(tmp_path):
    assert last_row(written(tmp_path, *LINES * 30_000))["step"] == 8
