import json
import logging
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from compoconf import parse_config

from jax_trainer.config.settings import SettingsError
from jax_trainer.logger import (
    JSONLConfig,
    Logger,
    LoggerConfig,
    TensorboardConfig,
    WandBConfig,
    folder_tool,
    run_path_parts,
    tools_of,
)
from jax_trainer.logger import logger as logger_file
from jax_trainer.logger.values import png_shape
from tests.logger.event_files import scalars_in
from tests.logger.faulty_tools import FaultyConfig, FaultyTool, threads_of_tools
from tests.logger.logger_runs import FLAT, PARAMS, PIXELS, a_figure, log_everything, logger_with
from tests.rows import noted_row

LOG = logging.getLogger("jax_trainer")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def given_to_a_tool(folder: Path, log: Any) -> list[Any]:
    logger = logger_with(folder, FaultyConfig())
    log(logger)
    logger.close("completed")
    assert logger.failures == {}
    return FaultyTool.latest.entries


def test_a_tool_gets_every_row_at_its_step_with_its_epoch(tmp_path_factory: pytest.TempPathFactory):
    for values in [
        {"epoch": 2, "train/loss_step": 1.0, "optimizer/norm_step": 1.0},
        {"epoch": 2, "train/loss_epoch": 1.0},
        {"epoch": 2, "val/loss": 1.0, "val/size_step": 1.0},
        {"epoch": 0, "optimizer/lr": 1.0},
        {"mine": 1.0},
    ]:
        with noted_row(values):
            tmp_path = tmp_path_factory.mktemp("row")
            given = given_to_a_tool(tmp_path, lambda logger, values=values: logger.write(70, values))
            assert given == [("row", 70, values)]
            assert rows_in(tmp_path) == [{"step": 70, **values}]


def test_one_number_can_be_logged_whatever_kind_it_is(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    for value in (jnp.float32(0.5), 1, math.nan):
        logger.log_scalar("mine/value", value, step=7)
    logger.close("completed")
    assert rows_in(tmp_path) == [{"step": 7, "mine/value": value} for value in (0.5, 1.0, "nan")]


def test_a_tool_gets_everything_in_order(tmp_path):
    kinds = [(kind, step) for kind, step, *_ in given_to_a_tool(tmp_path, log_everything)]
    rows = [("row", 50), ("row", 70), ("row", 7)]
    assert kinds == [*rows, ("image", 1), ("figure", 1), ("histogram", 2), ("text", 3), ("hparams", 7)]


def test_the_folder_is_there_before_anybody_writes_to_it(tmp_path):
    folder = tmp_path / "new" / "run"
    logger = Logger(LoggerConfig(), folder)
    assert folder.is_dir()
    LOG.info("first of all")
    logger.close("completed")
    assert "first of all" in (folder / "run.log").read_text()


def test_several_tools_get_the_same(tmp_path, caplog):
    logger = logger_with(tmp_path, FaultyConfig("write"), FaultyConfig("write"), JSONLConfig(), TensorboardConfig())
    logger.write(1, {"loss": 0.5})
    logger.close("completed")
    assert logger.failures == {"FaultyTool": 1, "FaultyTool 2": 1}
    assert len(list(tmp_path.glob("events*"))) == 1
    assert rows_in(tmp_path) == [{"step": 1, "loss": 0.5}]
    assert len(caplog.records) == 3  # one warning each, and the counts


def test_a_value_that_is_logged_may_change_afterwards(tmp_path):
    values, image, numbers, params = {"a": 1.0}, PIXELS.copy(), np.arange(3.0), {"lr": np.array(0.5)}
    figure = a_figure()

    def log(logger: Logger) -> None:
        logger.write(1, values)
        logger.log_image("i", image, 1)
        logger.log_histogram("h", numbers, 1)
        logger.log_hparams(params)
        logger.log_figure("f", figure, 1)
        values["a"] = 9.0
        image[:], numbers[:], params["lr"][...] = 9, 9, 9
        figure.set_size_inches(3, 3)

    row, picture, histogram, hparams, drawing = given_to_a_tool(tmp_path, log)
    assert row == ("row", 1, {"a": 1.0})
    np.testing.assert_array_equal(picture[-1], PIXELS)
    np.testing.assert_array_equal(histogram[-1], [0, 1, 2])
    assert hparams == ("hparams", 1, {"lr": 0.5}, {})
    assert png_shape(drawing[-1]) == (40, 60, 4)


def test_arrays_on_a_device_can_be_logged(tmp_path):
    def log(logger: Logger) -> None:
        logger.write(1, {"loss": jnp.float32(0.5), "matrix": jnp.eye(2)})
        logger.log_image("i", jnp.zeros((2, 2)), 1)
        logger.log_histogram("h", jnp.ones((2, 2), jnp.bfloat16), 1)
        logger.log_hparams(PARAMS, {"acc": jnp.float32(0.5)})

    row, picture, histogram, hparams = given_to_a_tool(tmp_path, log)
    assert row == ("row", 1, {"loss": 0.5})
    assert {type(thing[-1]) for thing in (picture, histogram)} == {np.ndarray}
    assert hparams[2:] == (FLAT, {"acc": 0.5})


class Unreadable:
    """Fails whenever somebody looks at it."""

    def savefig(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("nothing to draw on")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError("nothing to see")

    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


def test_a_value_that_cannot_be_logged_costs_a_warning_and_not_the_run(
    tmp_path_factory: pytest.TempPathFactory, caplog
):
    for log in [
        lambda logger: logger.log_figure("x", Unreadable(), 1),
        lambda logger: logger.log_figure("x", None, 1),
        lambda logger: logger.log_image("x", np.zeros(3), 1),
        lambda logger: logger.log_image("x", Unreadable(), 1),
        lambda logger: logger.log_histogram("x", Unreadable(), 1),
        lambda logger: logger.log_text("x", Unreadable(), 1),
        lambda logger: logger.log_scalar("x", np.zeros(3), 1),
        lambda logger: logger.log_scalar("x", Unreadable(), 1),
        lambda logger: logger.write(1, {"x": Unreadable()}),
        lambda logger: logger.log_hparams({"x": Unreadable()}),
        lambda logger: logger.save_metrics("x", {"x": Unreadable()}),
    ]:
        with noted_row(log):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            logger = logger_with(tmp_path)
            log(logger)
            log(logger)
            logger.write(1, {"loss": 0.5})
            assert not logger.flush()
            logger.close("completed")
            assert logger.failures == {"Logger": 2}
            first, last = [record.message for record in caplog.records]
            assert first.startswith("Logger could not log ") and "Training continues; " in first
            assert last.endswith("Logger dropped 2 entries.")
            assert rows_in(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_only_the_primary_process_writes(tmp_path, caplog):
    before = threading.active_count()
    logger = logger_with(tmp_path / "run", FaultyConfig("init"), is_primary=False)
    log_everything(logger)
    logger.log_figure("x", Unreadable(), 1)
    LOG.error("this is kept by the lead")
    assert logger.flush()
    assert (threading.active_count(), threads_of_tools(), logger.failures) == (before, [], {})
    logger.close("completed")
    assert not (tmp_path / "run").exists()
    assert logger.log_dir == tmp_path / "run"


def test_a_process_alone_is_the_primary_process(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    assert logger.is_primary and logger.log_dir == tmp_path
    logger.close("completed")


def test_closing_twice_is_closing_once(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jax_trainer"):
        logger = Logger(LoggerConfig(), tmp_path)
        logger.close("completed")
        logger.close("failed")
    assert len(caplog.records) == 1


def test_messages_from_the_chosen_level_on_are_kept(tmp_path_factory: pytest.TempPathFactory):
    by_level: dict[Any, str] = {
        "debug": "debug info warning error",
        "info": "info warning error",
        "warning": "warning error",
        "error": "error",
    }
    for verbosity, kept in by_level.items():
        with noted_row(verbosity, kept):
            tmp_path = tmp_path_factory.mktemp("row")
            logger = Logger(LoggerConfig(log_file_verbosity=verbosity), tmp_path)
            for level in ("debug", "info", "warning", "error"):
                getattr(LOG, level)(f"this is {level}")
            logger.close("completed")
            LOG.error("too late")
            lines = (tmp_path / "run.log").read_text().splitlines()
            assert [line.split()[-1] for line in lines if "this is" in line] == kept.split()
            assert not any("too late" in line for line in lines)


def test_the_tool_then_the_log_dir_then_the_model_say_where_a_run_belongs():
    for config, place in [
        (LoggerConfig(), ("runs", "MLP", None)),
        (LoggerConfig(log_dir="here"), ("here", "", None)),
        (LoggerConfig(tool_config=TensorboardConfig()), ("runs", "MLP", None)),
        (LoggerConfig(log_dir="here", tool_config=TensorboardConfig(save_dir="there")), ("there", "", None)),
        (LoggerConfig(tool_config=TensorboardConfig("there", "mine", "7")), ("there", "mine", "7")),
        (LoggerConfig(tool_config=TensorboardConfig("there", use_timestamp_version=False)), ("there", "", "0")),
        (LoggerConfig(tool_config=TensorboardConfig("there", "mine", "7", True)), ("there", "mine-7", None)),
        (LoggerConfig(tool_config=TensorboardConfig("there", "", "7", True)), ("there", "7", None)),
        (LoggerConfig(tool_config=WandBConfig(version="7", use_timestamp_version=True)), ("runs", "MLP-7", None)),
        (LoggerConfig(tool_config=TensorboardConfig("there", "mine", "7", False)), ("there", "mine", "7")),
        (LoggerConfig(tool_config=TensorboardConfig("there", use_timestamp_version=True)), ("there", "", None)),
        (LoggerConfig(log_dir="here", tool_config=TensorboardConfig(name="mine")), ("here", "mine", None)),
        (LoggerConfig(tool_config=FaultyConfig()), ("runs", "MLP", None)),
        (LoggerConfig(tool_config=WandBConfig()), ("runs", "MLP", None)),
        (LoggerConfig(tool_config=[FaultyConfig(), TensorboardConfig("there")]), ("there", "", None)),
        (LoggerConfig(tool_config=[TensorboardConfig(), WandBConfig(name="mine")]), ("runs", "mine", None)),
        (LoggerConfig(tool_config=[WandBConfig("here", "7"), TensorboardConfig("there")]), ("here", "", "7")),
    ]:
        with noted_row(config, place):
            parent, name, version = place
            assert run_path_parts(config, "MLP") == (Path(parent), name, version)


def test_tools_are_a_list_however_they_are_given():
    one, other = TensorboardConfig(), FaultyConfig()
    assert tools_of(LoggerConfig()) == tools_of(LoggerConfig(tool_config=[])) == []
    assert tools_of(LoggerConfig(tool_config=one)) == [one]
    assert tools_of(LoggerConfig(tool_config=[other, one])) == [other, one]
    assert folder_tool(LoggerConfig(tool_config=[other, one])) is one
    assert folder_tool(LoggerConfig(tool_config=other)) is None


def test_the_section_of_the_seed_document_is_read():
    section = {"log_dir": "tests/checkpoints/", "log_steps_every": 50, "log_file_verbosity": "warning"}
    config = parse_config(Logger.cfgtype, {"class_name": "Logger", **section})
    assert config == LoggerConfig(log_dir="tests/checkpoints/", log_file_verbosity="warning")


def test_an_impossible_section_is_refused():
    with pytest.raises(
        SettingsError, match="`log_file_verbosity` must be one of debug, info, warning, error, got 'loud'"
    ):
        LoggerConfig(log_file_verbosity="loud")  # type: ignore[arg-type]


def test_a_mark_is_the_size_of_the_record_at_its_point_whoever_asks_when(tmp_path):
    logger, file, marks = logger_with(tmp_path), tmp_path / "metrics.jsonl", []
    for step in range(300):
        marks.append(logger.mark())
        logger.write(step, {"epoch": 1, "train/loss_step": step / 7})
    with ThreadPoolExecutor(2) as pool:
        sizes = [mark.size for mark in pool.map(lambda mark: mark(), marks) if mark is not None]
    logger.close("completed")
    lengths = [len(line) + 1 for line in file.read_bytes().splitlines()]
    assert sizes == [sum(lengths[:step]) for step in range(300)]
    assert marks[-1]() == (sizes[-1], ())


def test_the_rows_before_a_mark_are_on_the_disk(tmp_path, monkeypatch):
    logger, synced = logger_with(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    logger.write(1, {"epoch": 1, "val/loss": 0.5})
    mark = logger.mark()
    assert logger.flush() and not synced
    found = mark()
    [size] = synced
    assert found == (size, ())
    assert size == (tmp_path / "metrics.jsonl").stat().st_size
    logger.close("completed")


def test_there_is_no_mark_where_nothing_is_written(tmp_path):
    other, closed, deleted = (
        logger_with(tmp_path, is_primary=False),
        logger_with(tmp_path),
        logger_with(tmp_path / "new"),
    )
    closed.close("completed")
    deleted.write(1, {"loss": 0.5})
    assert deleted.flush()
    (tmp_path / "new" / "metrics.jsonl").unlink()
    assert [logger.mark()() for logger in (other, closed, deleted)] == [None, None, None]
    deleted.close("completed")


def test_a_checkpoint_has_the_tools_write_what_they_have(tmp_path):
    logger = logger_with(tmp_path, TensorboardConfig())
    for step in (1, 2, 3):
        logger.write(step, {"loss": 0.5})
    assert logger.mark()() is not None
    assert scalars_in(tmp_path)["loss"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    logger.close("completed")


def test_a_checkpoint_waits_only_once_for_a_tool_that_cannot_keep_up(tmp_path, monkeypatch):
    monkeypatch.setattr(FaultyTool, "write", lambda tool, step, values: time.sleep(0.05))
    monkeypatch.setattr(logger_file, "TOOL_SECONDS", 0.3)
    logger, spent = logger_with(tmp_path, FaultyConfig()), []
    for step in range(40):
        logger.write(step, {"loss": 0.5})
    for _ in range(3):
        began = time.perf_counter()
        assert logger.mark()() is not None
        spent.append(time.perf_counter() - began)
        time.sleep(0.15)  # it writes some entries meanwhile
    assert spent[0] > 0.3 > sum(spent[1:])
    logger.close("completed")
    assert logger.failures == {}


def test_a_checkpoint_waits_for_a_tool_that_blocks_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_file, "TOOL_SECONDS", 0.3)
    monkeypatch.setattr(logger_file, "CLOSING_SECONDS", 0.1)
    logger = logger_with(tmp_path, FaultyConfig(blocks_in="write"))
    logger.write(1, {"loss": 0.5})
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        assert logger.mark()() is not None
        spent.append(time.perf_counter() - began)
    assert spent[0] >= 0.3 > max(spent[1:])
    FaultyTool.gate.set()
    assert logger.flush(10)
    logger.write(2, {"loss": 0.5})
    assert logger.mark()() is not None
    assert FaultyTool.latest.rows() == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]  # it is waited for again
    logger.close("completed")


def test_the_end_of_a_run_waits_for_a_tool_that_is_still_starting_and_loses_nothing(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(logger_file, "CLOSING_SECONDS", 0.2)
    logger = logger_with(tmp_path, FaultyConfig(blocks_in="init"))
    logger.write(1, {"loss": 0.5})
    starting = threading.Timer(1.3, FaultyTool.gate.set)
    starting.start()
    logger.close("completed")
    starting.join()
    assert (FaultyTool.latest.rows(), FaultyTool.latest.closed) == ([(1, {"loss": 0.5})], ["completed"])
    assert logger.failures == {}
    assert "FaultyTool, which is still starting; 59 s" in caplog.text
    assert "still starting" in (tmp_path / "run.log").read_text()
