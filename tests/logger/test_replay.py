import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer.logger import CSVConfig, Logger, LoggerConfig, RecordMark, TensorboardConfig
from jax_trainer.logger.values import bins_of
from tests.logger.faulty_tools import FaultyConfig, FaultyTool
from tests.logger.logger_runs import FLAT, PIXELS, log_everything, logger_with
from tests.logger.tool_files import shown
from tests.rows import noted_row


def replayed(folder: Path, x_axis: Any = "step", *tools: Any) -> Any:
    """A tool that has dropped everything, and what the logger then wrote again."""
    tools = tools or (FaultyConfig(drops=True),)
    logger = Logger(LoggerConfig(tool_config=list(tools), x_axis=x_axis), folder)
    logger.cut(RecordMark((folder / "metrics.jsonl").stat().st_size), 70)
    assert logger.flush(30)
    logger.close("completed")
    assert logger.failures == {}
    return FaultyTool.latest


def test_a_tool_that_drops_everything_gets_everything_again(tmp_path):
    logger = logger_with(tmp_path, FaultyConfig())
    log_everything(logger)
    logger.write(80, {"bad": float("nan"), "huge": float("-inf")})
    logger.close("completed")
    before = {kind: (at, *rest) for kind, at, *rest in FaultyTool.latest.entries if kind != "row"}
    rows = FaultyTool.latest.rows()
    tool = replayed(tmp_path)
    assert (str(tool.rows()), tool.resumed_at) == (str(rows), 70)
    named = [(kind, *rest) for kind, *rest in tool.entries if kind in ("figure", "histogram", "text")]
    after = {(kind, name): (at, thing) for kind, at, name, thing in named}
    assert after["figure", "val/curve"] == (before["figure"][0], before["figure"][2])
    assert after["figure", "val/example"] == (1, (tmp_path / "media" / "val_example_1.png").read_bytes())
    assert after["text", "notes"] == (3, "a <b> & c")
    step, values = after["histogram", "param/kernel"]
    assert (step, bins_of(values)) == (2, bins_of(np.linspace(0, 3, 300)))
    [hparams] = [entry for entry in tool.entries if entry[0] == "hparams"]
    assert hparams[1:] == (7, FLAT, {"test/acc": 0.75})


def test_a_tool_that_cannot_drop_anything_gets_nothing_again(tmp_path):
    logger = logger_with(tmp_path, FaultyConfig())
    log_everything(logger)
    logger.close("completed")
    assert replayed(tmp_path, "step", FaultyConfig()).entries == []


def test_lines_that_are_no_rows_and_pictures_that_are_gone_are_left_out(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"not in media")
    lines = ['{"step": 1, "loss": 0.5}', '{"step": 2, "lo', "[1]", '{"step": "3"}', '{"step": 4, "arrays": {"a": [1]}}']
    lines += ['{"step": 5, "media": {"gone": "media/gone_5.png", "far": "secret.png"}}', '{"step": 6, "loss": 0.25}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert replayed(tmp_path).entries == [("row", 1, {"loss": 0.5}), ("row", 6, {"loss": 0.25})]


def test_rows_of_another_axis_are_left_out_with_a_warning(tmp_path, caplog):
    logger = logger_with(tmp_path)
    logger.write(2, {"loss": 0.5})
    logger.write(4, {"loss": 0.5, "examples": 128})
    logger.close("completed")
    assert replayed(tmp_path, "examples").entries == [("row", 128, {"loss": 0.5})]
    assert "1 rows" in caplog.text and "examples" in caplog.text


def test_rows_after_the_checkpoint_are_not_replayed(tmp_path):
    first = logger_with(tmp_path, FaultyConfig(drops=True))
    first.write(1, {"loss": 0.5})
    mark = first.mark()()
    first.write(2, {"loss": 0.25})
    first.cut(mark, 1)  # a rollback
    first.write(2, {"loss": 0.125})
    first.close("completed")
    assert FaultyTool.latest.rows() == [(1, {"loss": 0.5}), (2, {"loss": 0.125})]


def test_files_have_every_point_once_on_every_axis(tmp_path_factory: pytest.TempPathFactory):
    axes: list[Any] = ["step", "epoch"]
    for x_axis in axes:
        for tool in ["tensorboard", "csv"]:
            with noted_row(x_axis, tool):
                tmp_path = tmp_path_factory.mktemp("row")
                config = {"tensorboard": TensorboardConfig(), "csv": CSVConfig()}[tool]
                options = LoggerConfig(tool_config=config, x_axis=x_axis)
                first = Logger(options, tmp_path)
                marks = []
                for step in (4, 8):
                    first.count(step, step // 4)
                    first.write(step, {"epoch": step // 4, "val/loss": step / 2})
                    first.log_image("val/example", PIXELS, step=step)
                    marks.append(first.mark()())
                first.write(8, {"epoch": 2, "train/loss": 0.5})
                first.close("failed")
                second = Logger(options, tmp_path)
                second.cut(marks[0], 4)
                second.count(8, 2)
                second.write(8, {"epoch": 2, "val/loss": 4.0})
                second.log_image("val/example", PIXELS, step=8)
                second.close("completed")
                curves, pictures = shown(tool, tmp_path)
                places = [(4, 2.0), (8, 4.0)] if x_axis == "step" else [(1, 2.0), (2, 4.0)]
                assert {name: points for name, points in curves.items() if "/" in name and points} == {
                    "val/loss": places
                }
                assert len(pictures) == 2


def test_a_fork_has_the_curves_of_the_run_that_it_continues(tmp_path):
    first = logger_with(tmp_path / "first", TensorboardConfig())
    marks = []
    for step in (1, 2, 3):
        first.write(step, {"train/loss": step})
        marks.append(first.mark()())
    first.close("completed")
    (tmp_path / "fork").mkdir()
    shutil.copy(tmp_path / "first" / "metrics.jsonl", tmp_path / "fork")
    fork = logger_with(tmp_path / "fork", TensorboardConfig())
    fork.cut(marks[1], 2)
    fork.write(3, {"train/loss": 9.0})
    fork.close("completed")
    assert shown("tensorboard", tmp_path / "fork")[0]["train/loss"] == [(1, 1.0), (2, 2.0), (3, 9.0)]
