import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer.logger import JSONLConfig, Logger, LoggerConfig
from jax_trainer.logger.jsonl import cut
from jax_trainer.logger.values import bins_of
from tests.logger.logger_runs import FLAT, PIXELS, a_figure, image_in, log_everything, logger_with
from tests.rows import noted_row


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_everything_is_a_row_and_pictures_are_files(tmp_path):
    logger = logger_with(tmp_path)
    log_everything(logger)
    logger.close("completed")
    bins = bins_of(np.linspace(0, 3, 300))
    assert rows_in(tmp_path) == [
        {"step": 50, "epoch": 1, "train/loss_step": 0.5},
        {"step": 70, "epoch": 1, "val/loss": 0.25},
        {"step": 7, "mine/value": 0.125},
        {"step": 1, "media": {"val/example": "media/val_example_1.png"}},
        {"step": 1, "media": {"val/curve": "media/val_curve_1.png"}},
        {"step": 2, "histograms": {"param/kernel": {"counts": bins.counts, "edges": bins.edges, "left_out": 0}}},
        {"step": 3, "text": {"notes": "a <b> & c"}},
        {"step": 7, "hparams": FLAT, "metrics": {"test/acc": 0.75}},
    ]
    np.testing.assert_array_equal(image_in(tmp_path / "media" / "val_example_1.png"), PIXELS)
    assert image_in(tmp_path / "media" / "val_curve_1.png").shape == (40, 60, 4)


def test_the_metrics_file_is_always_there_and_never_twice(tmp_path_factory: pytest.TempPathFactory):
    for tools in [None, JSONLConfig(), [JSONLConfig(), JSONLConfig()], []]:
        with noted_row(tools):
            tmp_path = tmp_path_factory.mktemp("row")
            logger = Logger(LoggerConfig(tool_config=tools), tmp_path)
            logger.write(1, {"loss": 0.5})
            logger.close("completed")
            assert rows_in(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_a_value_that_is_not_finite_is_text(tmp_path):
    logger = logger_with(tmp_path)
    logger.write(1, {"bad": np.nan, "huge": np.float32(np.inf)})
    logger.log_hparams({"limit": np.inf}, {"loss": np.nan})
    logger.log_histogram("h", np.array([np.nan, 1.0]), 1)
    logger.close("completed")
    assert rows_in(tmp_path)[:2] == [
        {"step": 1, "bad": "nan", "huge": "inf"},
        {"step": 1, "hparams": {"limit": "inf"}, "metrics": {"loss": "nan"}},
    ]
    assert rows_in(tmp_path)[2]["histograms"]["h"]["left_out"] == 1


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    logger, marks = logger_with(tmp_path), []
    for epoch in (1, 2):
        logger.write(4 * epoch, {"epoch": epoch, "val/loss": 0.5})
        logger.log_figure("val/curve", a_figure(), epoch)
        logger.log_text("notes", str(epoch), epoch)
        logger.log_histogram("h", np.arange(3), epoch)
        marks.append(logger.mark())
    logger.log_hparams({"lr": 0.1}, {"acc": 1})
    logger.close("interrupted")
    whole = rows_in(tmp_path)
    for mark, kept in reversed([*zip(marks, (4, 8), strict=True)]):
        found = mark()
        assert found is not None
        cut(tmp_path / "metrics.jsonl", found.size)
        assert rows_in(tmp_path) == whole[:kept]


def test_metrics_with_arrays_have_files_of_their_own(tmp_path):
    logger = logger_with(tmp_path)
    matrix = np.eye(2)
    logger.save_metrics("val_epoch_0001", {"val/acc": np.float32(0.5), "val/matrix": matrix, "val/loss": np.nan})
    matrix[:] = 7
    logger.save_metrics("../../x", {})
    assert logger.flush()
    assert json.loads((tmp_path / "metrics" / "val_epoch_0001.json").read_text()) == {
        "val/acc": 0.5,
        "val/matrix": [[1, 0], [0, 1]],
        "val/loss": "nan",
    }
    assert {path.name for path in (tmp_path / "metrics").iterdir()} == {"val_epoch_0001.json", "_.._x.json"}
    logger.close("completed")


def test_the_arrays_of_evaluations_are_rows_and_a_file_has_the_latest(tmp_path):
    logger = logger_with(tmp_path)
    for epoch in range(1, 4):
        metrics = {"val/loss": np.float32(0.5) / epoch, "val/matrix": np.full((2, 2), epoch)}
        logger.save_evaluation(4 * epoch, epoch, "val", metrics)
    logger.save_evaluation(12, 3, "test", {"test/loss": np.nan})
    assert logger.flush()
    assert rows_in(tmp_path) == [
        {"step": 4 * epoch, "epoch": epoch, "arrays": {"val/matrix": [[epoch] * 2] * 2}} for epoch in range(1, 4)
    ]
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "metrics").iterdir()}
    assert files == {
        "val.json": {"step": 12, "epoch": 3, "val/loss": pytest.approx(0.5 / 3), "val/matrix": [[3, 3], [3, 3]]},
        "test.json": {"step": 12, "epoch": 3, "test/loss": "nan"},
    }
    logger.close("completed")


def test_flushing_makes_the_record_exact(tmp_path):
    logger = logger_with(tmp_path)
    for step in range(200):
        logger.write(step, {"loss": 0.5})
    assert logger.flush()
    assert len(rows_in(tmp_path)) == 200
    logger.close("completed")


def spoilt(folder: Path, how: str) -> None:
    """Puts something in the way of a record."""
    if how == "a folder in its place":
        (folder / "metrics.jsonl").mkdir()
    elif how == "a file for a folder":
        (folder / "media").write_text("")


def test_a_disk_that_fails_costs_rows_and_a_warning(tmp_path_factory: pytest.TempPathFactory, caplog):
    for how, lost, why in [
        ("a folder in its place", 4, "IsADirectoryError"),
        ("a file for a folder", 1, "FileExistsError"),
    ]:
        with noted_row(how, lost, why):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            spoilt(tmp_path, how)
            logger = logger_with(tmp_path)
            logger.write(1, {"loss": 0.5})
            logger.log_image("image", PIXELS, 1)
            logger.write(2, {"loss": 0.5})
            assert not logger.flush()
            logger.close("completed")
            assert logger.failures == {"JSONLToolLogger": lost}
            first, last = [record.message for record in caplog.records]
            assert first.startswith("JSONLToolLogger failed: ") and why in first and "lost" in first
            assert last.endswith(f"JSONLToolLogger dropped {lost} entries.")


def test_a_folder_that_is_deleted_costs_what_comes_after(tmp_path, caplog):
    folder = tmp_path / "run"
    logger = logger_with(folder)
    logger.write(1, {"loss": 0.5})
    assert logger.flush()
    shutil.rmtree(folder)
    logger.write(2, {"loss": 0.5})
    logger.log_image("image", PIXELS, 1)
    logger.save_metrics("val", {})
    logger.close("completed")
    assert logger.failures == {"JSONLToolLogger": 3}
    assert "was deleted" in caplog.text
    assert not folder.exists()


@pytest.fixture
def full_disk(monkeypatch):
    """A function that says how many bytes of a line there is still room for; None: there is room again."""
    room: list[int | None] = [None]
    write = os.write

    def limited(handle: int, line: bytes) -> int:
        if room[0] is None or not os.readlink(f"/proc/self/fd/{handle}").endswith("metrics.jsonl"):
            return write(handle, line)
        written = write(handle, line[: room[0]])
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    monkeypatch.setattr("jax_trainer.diagnostics.files.os.write", limited)
    return lambda left: room.__setitem__(0, left)


@pytest.mark.parametrize("left", [0, 7])
def test_rows_for_which_there_is_no_space_are_written_in_order_once_there_is(tmp_path, caplog, full_disk, left):
    logger = logger_with(tmp_path)
    logger.write(1, {"loss": 0.5})
    assert logger.flush()
    full_disk(left)
    for step in range(2, 40):  # more than a tool may fail in a row
        logger.write(step, {"loss": 0.25})
    assert not logger.flush()
    assert [row["step"] for row in rows_in(tmp_path)] == [1]  # no half of a line either
    full_disk(None)
    logger.write(40, {"loss": 0.125})
    logger.close("completed")
    assert [row["step"] for row in rows_in(tmp_path)] == list(range(1, 41))
    assert logger.failures == {}
    assert caplog.text.count("No space left on device") == 1


def test_a_mark_has_the_rows_that_are_not_on_the_disk_and_they_are_there_after_a_resume(tmp_path, full_disk):
    logger = logger_with(tmp_path)
    logger.write(1, {"loss": 0.5})
    assert logger.flush()
    full_disk(0)
    logger.write(2, {"loss": 0.25})
    mark = logger.mark()()
    logger.write(3, {"loss": 0.125})
    logger.close("failed")
    assert logger.failures == {"JSONLToolLogger": 2}
    full_disk(None)
    assert mark is not None and len(mark.unwritten) == 1
    resumed = logger_with(tmp_path)
    resumed.cut(mark)
    resumed.write(3, {"loss": 0.125})
    resumed.close("completed")
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2, 3]
