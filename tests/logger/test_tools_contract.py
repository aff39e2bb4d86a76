"""What every tool keeps, whatever it is, and what a run keeps, whatever a tool does. A new tool is a row in `TOOLS`."""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compoconf import Registry

from jax_trainer.logger import (
    CSVConfig,
    JSONLConfig,
    MLflowConfig,
    TensorboardConfig,
    ToolLoggerInterface,
    WandBConfig,
)
from jax_trainer.logger import logger as logger_file
from jax_trainer.testing import assert_same_bits
from tests.logger.faulty_tools import FaultyConfig, FaultyTool, threads_of_tools, wait_until
from tests.logger.logger_runs import PIXELS, log_everything, logger_with, train_two_epochs
from tests.logger.tool_files import shown
from tests.rows import noted_row

TOOLS: dict[str, Callable[[], Any]] = {
    "jsonl": JSONLConfig,
    "csv": CSVConfig,
    "tensorboard": TensorboardConfig,
    "wandb": lambda: WandBConfig(mode="offline"),
    "mlflow": MLflowConfig,
    "own": FaultyConfig,
}


def all_tools(*longer: str, without: str = "") -> list[Any]:
    """The rows of the table; those of `longer`, and MLflow, which only `make integrations` installs, with a mark."""
    marks = lambda name: pytest.mark.integration if name in ("mlflow", *longer) else ()
    return [pytest.param(name, marks=marks(name)) for name in TOOLS if name != without]


@pytest.fixture(params=all_tools())
def tool(request: pytest.FixtureRequest) -> Any:
    """The configuration of every tool there is, and of one that there is not."""
    if request.param == "wandb":
        request.getfixturevalue("offline_wandb")
    return TOOLS[request.param]()


def kind_of(tool: Any) -> type[Any]:
    """What the logger calls in this process."""
    return Registry.get_class(ToolLoggerInterface, tool.class_name)  # type: ignore[arg-type, return-value]


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name == "jax_trainer"]
    return [record.message for record in own if record.levelno >= logging.WARNING]


def rows_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("tool", all_tools("wandb"), indirect=True)
def test_a_tool_takes_every_kind_of_entry_and_ignores_those_after_the_end(tool, tmp_path, caplog):
    logger = logger_with(tmp_path, tool)
    log_everything(logger)
    assert logger.flush(30)
    logger.close("completed")
    rows = rows_in(tmp_path)
    log_everything(logger)
    logger.close("failed")
    assert logger.flush()
    assert (logger.failures, our_warnings(caplog), rows_in(tmp_path)) == ({}, [], rows)
    assert not threads_of_tools()


FAULTS = {
    "init": ("__init__", 0, 4),
    "every write": ("write", 0, 3),
    "one write": ("write", 2, 1),
    "close": ("close", 0, 1),
}


def test_a_tool_may_raise(tool, tmp_path, caplog, monkeypatch):
    name, kind = tool.class_name, kind_of(tool)
    for fault, (method, at, lost) in FAULTS.items():
        real, calls = getattr(kind, method), []
        caplog.clear()

        def broken(*args: Any, at: int = at, calls: list[Any] = calls, real: Any = real) -> None:
            calls.append(args)
            if at in (0, len(calls)):
                raise ConnectionError("no way")
            real(*args)

        folder = tmp_path / fault
        with noted_row(fault), monkeypatch.context() as patch:
            patch.setattr(kind, method, broken)
            logger = logger_with(folder, tool)
            for step in (1, 2, 3):
                logger.write(step, {"loss": 0.5})
            logger.close("completed")
            assert logger.failures == {name: lost}
            first, last = our_warnings(caplog)
            assert first.startswith(f"{name} failed: ConnectionError: no way")
            assert name in last and f"{lost} entries" in last
            assert last in (folder / "run.log").read_text()
            if name != "JSONLToolLogger":
                assert rows_in(folder) == [1, 2, 3]
            if method == "close":  # so that nothing stays open
                real(calls[0][0], "completed")


def test_a_tool_may_block(tool, tmp_path, caplog, monkeypatch):
    kind = kind_of(tool)
    monkeypatch.setattr(logger_file, "CLOSING_SECONDS", 0.3)
    for method in ("__init__", "write", "close"):
        real, FaultyTool.gate = getattr(kind, method), threading.Event()
        caplog.clear()

        def blocked(*args: Any, real: Any = real) -> None:
            assert FaultyTool.gate.wait(60)
            real(*args)

        with noted_row(method), monkeypatch.context() as patch:
            patch.setattr(kind, method, blocked)
            logger = logger_with(tmp_path / method, tool)
            logger.config.tool_start_timeout = 0.1
            spent = []
            for step in range(1200):
                began = time.perf_counter()
                logger.write(step, {"loss": 0.5})
                spent.append(time.perf_counter() - began)
            assert sorted(spent)[1180] < 0.005
            assert logger.flush(0.1 if method != "close" else 30) == (method == "close")
            began = time.perf_counter()
            logger.close("completed")
            assert time.perf_counter() - began < 5
            assert logger.failures.keys() == {tool.class_name}
            assert len(our_warnings(caplog)) == 2
            FaultyTool.gate.set()
            wait_until(lambda: not threads_of_tools(), 60)


def test_closing_takes_seconds_whatever_tools_do():
    assert logger_file.CLOSING_SECONDS <= 5


def test_the_folder_of_a_tool_may_be_a_file(tool, tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    logger = logger_with(tmp_path / "run", tool)
    log_everything(logger)
    logger.close("completed")
    assert (tmp_path / "run").read_text() == "in the way"
    assert logger.failures.keys() == {"JSONLToolLogger", tool.class_name} - {"FaultyTool"}


def test_the_folder_of_a_tool_may_be_deleted(tool, tmp_path, caplog):
    logger = logger_with(tmp_path / "run", tool)
    log_everything(logger)
    logger.flush(30)
    shutil.rmtree(tmp_path / "run")
    log_everything(logger)
    logger.close("completed")
    assert logger.failures["JSONLToolLogger"] >= 8  # of 9: wandb makes the folder again
    assert not threads_of_tools()


def test_training_gives_the_same_bits_whatever_a_tool_does(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_file, "CLOSING_SECONDS", 0.3)
    alone = logger_with(tmp_path / "alone")
    expected = train_two_epochs(alone)
    alone.close("completed")
    faults = FaultyConfig("init"), FaultyConfig("write"), FaultyConfig("write", at=3), FaultyConfig(blocks_in="write")
    for number, fault in enumerate(faults):
        with noted_row(fault):
            logger = logger_with(tmp_path / str(number), fault)
            assert_same_bits(train_two_epochs(logger), expected)
            logger.close("completed")
            assert logger.failures.keys() == {"FaultyTool"}
            assert rows_in(tmp_path / str(number)) == rows_in(tmp_path / "alone")


@pytest.mark.parametrize("tool", all_tools(without="own"), indirect=True)
def test_a_resumed_run_has_every_point_once(tool, request, tmp_path):
    first = logger_with(tmp_path, tool)
    first.write(2, {"epoch": 1, "train/loss": 2.0})
    first.write(4, {"epoch": 1, "train/loss": 4.0})
    first.write(4, {"epoch": 1, "val/loss": 0.5})
    first.log_image("val/example", PIXELS, step=4)
    assert first.flush(60)
    mark = first.mark()()  # a checkpoint of step 4
    first.write(4, {"epoch": 1, "train/loss_epoch": 3.5})
    first.write(6, {"epoch": 2, "train/loss": 6.5})
    first.log_image("val/example", PIXELS, step=6)
    first.write(8, {"epoch": 2, "train/loss": 8.5, "only/before": 1.0})
    assert first.flush(60)
    first.close("failed")
    ids = {file.name: file.read_text() for file in tmp_path.glob("*-id.txt")}

    second = logger_with(tmp_path, tool)
    second.cut(mark, 4)
    second.write(4, {"epoch": 1, "train/loss_epoch": 3.0})
    second.write(6, {"epoch": 2, "train/loss": 6.0})
    second.log_image("val/example", PIXELS, step=6)
    assert second.flush(60)
    second.close("completed")
    assert second.failures == {}

    curves, pictures = shown(request.node.callspec.params["tool"], tmp_path)
    assert {name: points for name, points in curves.items() if name != "epoch"} == {
        "train/loss": [(2, 2.0), (4, 4.0), (6, 6.0)],
        "val/loss": [(4, 0.5)],
        "train/loss_epoch": [(4, 3.0)],
    }
    assert {x for x, _ in curves["epoch"]} == {2, 4, 6}
    assert sorted(pictures) == [4, 6]
    assert {file.name: file.read_text() for file in tmp_path.glob("*-id.txt")} == ids
