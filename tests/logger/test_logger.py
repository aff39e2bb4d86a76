import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from compoconf import parse_config, register

from jax_trainer.logger import Logger, LoggerConfig, TensorboardConfig, ToolLoggerInterface, run_place
from jax_trainer.settings import Settings, SettingsError

LOG = logging.getLogger("jax_trainer")


@dataclass
class BrittleConfig(Settings):
    """When it breaks: at "init", "write" or "close"; "" never."""

    breaks_at: str = ""


@register
class BrittleTool(ToolLoggerInterface):
    """Remembers what it is given, or breaks."""

    config: BrittleConfig
    latest: ClassVar[Any] = None

    def __init__(self, config: BrittleConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.given: list[tuple[int, dict[str, float]]] = []
        BrittleTool.latest = self
        self._break("init")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._break("write")
        self.given.append((step, dict(values)))

    def close(self, status: str) -> None:
        self._break("close")

    def _break(self, place: str) -> None:
        if self.config.breaks_at == place:
            raise OSError(f"no way to {place}")


def rows_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("place", "failures"), [("init", 1), ("write", 3), ("close", 1), ("", 0)])
def test_a_tool_that_throws_costs_one_warning_and_a_count(tmp_path, caplog, place, failures):
    with caplog.at_level(logging.INFO, "jax_trainer"):
        logger = Logger(LoggerConfig(tool_config=BrittleConfig(place)), tmp_path)
        for step in (1, 2, 3):
            logger.write(step, {"loss": 0.5})
        logger.close("completed")
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2, 3]
    *before, last = [record.message for record in caplog.records]
    assert last.startswith(f"Run completed: 3 rows in {tmp_path / 'metrics.jsonl'}.")
    if failures:
        why = f"OSError: no way to {place}"
        assert before == [f"BrittleTool failed, and training goes on; metrics.jsonl has every number. {why}"]
        assert f"BrittleTool failed {failures} times" in last
    else:
        assert before == []


def test_the_runs_own_record_may_fail_loudly(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.close("completed")
    with pytest.raises(ValueError, match="closed"):
        logger.write(1, {"loss": 0.5})


@pytest.mark.parametrize(
    ("values", "x"),
    [
        ({"epoch": 2, "train/loss_step": 1.0, "optimizer/norm_step": 1.0}, 70),
        ({"epoch": 2, "train/loss_epoch": 1.0}, 2),
        ({"epoch": 2, "val/loss": 1.0, "val/size_step": 1.0}, 2),
        ({"epoch": 0, "optimizer/lr": 1.0}, 0),
        ({"mine": 1.0}, 70),
    ],
)
def test_the_tool_gets_steps_for_rows_of_steps_and_epochs_for_the_rest(tmp_path, values, x):
    logger = Logger(LoggerConfig(tool_config=BrittleConfig()), tmp_path)
    logger.write(70, values)
    logger.close("completed")
    assert BrittleTool.latest.given == [(x, {name: 1.0 for name in values if name != "epoch"})]
    assert rows_in(tmp_path) == [{"step": 70, **values}]


def test_one_number_can_be_logged_whatever_kind_it_is(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    for value in (jnp.float32(0.5), 1, math.nan):
        logger.log_scalar("mine/value", value, step=7)
    logger.close("completed")
    assert rows_in(tmp_path) == [{"step": 7, "mine/value": value} for value in (0.5, 1.0, "nan")]


def test_closing_twice_is_closing_once(tmp_path, caplog):
    logger = Logger(LoggerConfig(), tmp_path)
    with caplog.at_level(logging.INFO, "jax_trainer"):
        logger.close("completed")
        logger.close("failed")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("verbosity", "kept"),
    [
        ("debug", "debug info warning error"),
        ("info", "info warning error"),
        ("warning", "warning error"),
        ("error", "error"),
    ],
)
def test_messages_from_the_chosen_level_on_are_kept(tmp_path, verbosity, kept):
    logger = Logger(LoggerConfig(log_file_verbosity=verbosity), tmp_path)
    for level in ("debug", "info", "warning", "error"):
        getattr(LOG, level)(f"this is {level}")
    logger.close("completed")
    LOG.error("too late")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines if "this is" in line] == kept.split()
    assert not any("too late" in line for line in lines)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (LoggerConfig(), ("runs", "MLP", None)),
        (LoggerConfig(log_dir="here"), ("here", "", None)),
        (LoggerConfig(tool_config=TensorboardConfig()), ("runs", "MLP", None)),
        (LoggerConfig(log_dir="here", tool_config=TensorboardConfig(save_dir="there")), ("there", "", None)),
        (LoggerConfig(tool_config=TensorboardConfig("there", "mine", "7")), ("there", "mine", "7")),
        (LoggerConfig(tool_config=TensorboardConfig("there", use_timestamp_version=False)), ("there", "", "0")),
        (LoggerConfig(log_dir="here", tool_config=TensorboardConfig(name="mine")), ("here", "mine", None)),
        (LoggerConfig(tool_config=BrittleConfig()), ("runs", "MLP", None)),
    ],
)
def test_the_tool_then_the_log_dir_then_the_model_say_where_a_run_belongs(config, place):
    parent, name, version = place
    assert run_place(config, "MLP") == (Path(parent), name, version)


def test_the_section_of_the_seed_document_is_read():
    section = {"log_dir": "tests/checkpoints/", "log_steps_every": 50, "log_file_verbosity": "warning"}
    config = parse_config(Logger.cfgtype, {"class_name": "Logger", **section})
    assert config == LoggerConfig(log_dir="tests/checkpoints/", log_file_verbosity="warning")


def test_an_impossible_section_is_refused():
    with pytest.raises(
        SettingsError, match="`log_file_verbosity` must be one of debug, info, warning, error, got 'loud'"
    ):
        LoggerConfig(log_file_verbosity="loud")  # type: ignore[arg-type]
