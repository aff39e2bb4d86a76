"""A tool in a process of its own; that of `metrics.csv` stands for all of them."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from faulty_tools import wait_until
from logger_runs import log_everything, logger_with
from tool_files import wait_for_processes

from jax_trainer.logger import CSVConfig, CSVToolLogger
from jax_trainer.logger.process import ToolProcess, ToolProcessError, _request, _requests
from jax_trainer.stop_signals import STOP_SIGNALS

KILLED = """
import os, signal, sys
from pathlib import Path
from jax_trainer.logger import CSVConfig
from jax_trainer.logger.process import ToolProcess
tool = ToolProcess(CSVConfig(), Path(sys.argv[1]))
for step in range(500):
    tool.write(step, {"loss": 0.5})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the logger run the tool of `metrics.csv` in a process."""
    monkeypatch.setattr(CSVToolLogger, "own_process", True)


def lines_in(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()


def test_requests_arrive_as_they_were_sent():
    sent = [
        ("write", (3, {"loss": 0.5, "huge": float("inf")})),
        ("figure", (1, "val/curve", b"\x89PNG\n\x00{}\n")),
        ("image", (1, "val/example", np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::2])),
        ("histogram", (2, "h", np.array([[1.5, np.nan]], np.float32))),
        ("flush", ()),
    ]
    pipe = io.BytesIO(b"".join(_request(method, args) for method, args in sent))
    for (method, args), (found, given) in zip(sent, _requests(pipe), strict=True):
        assert (found, given[:-1]) == (method, list(args[:-1]))
        for one, other in zip(args[-1:], given[-1:], strict=True):
            np.testing.assert_equal(other, one)
            assert getattr(other, "dtype", None) == getattr(one, "dtype", None)


def test_a_tool_in_a_process_writes_and_resumes_as_one_in_a_thread(in_process, tmp_path, monkeypatch, capfd):
    def logged(folder: Path) -> list[str]:
        logger = logger_with(folder, CSVConfig())
        log_everything(logger)
        mark = logger.mark()()
        logger.write(90, {"val/loss": 0.125})
        logger.cut(mark, 70)  # as after a rollback
        logger.write(80, {"val/loss": 0.1})
        assert logger.flush(60)
        logger.close("completed")
        assert logger.failures == {}
        return [*lines_in(folder), (folder / "hparams.csv").read_text()]

    found = logged(tmp_path / "process")
    monkeypatch.setattr(CSVToolLogger, "own_process", False)
    assert found == logged(tmp_path / "thread")
    assert found[-2].startswith("80,")
    assert capfd.readouterr() == ("", "")


def test_an_error_at_the_start_of_a_process_is_counted_also_after_a_short_run(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.process.CLOSING_SECONDS", 0.01)
    (tmp_path / "metrics.csv").mkdir()
    logger = logger_with(tmp_path, CSVConfig())
    logger.write(1, {"loss": 0.5})
    logger.close("completed")  # long before the process has started
    assert logger.failures.keys() == {"CSVToolLogger"}


@pytest.mark.integration
def test_an_error_there_is_counted_here(in_process, tmp_path, caplog):
    logger = logger_with(tmp_path, CSVConfig())
    logger.write(1, {"loss": 0.5})
    assert logger.flush(60)
    (tmp_path / "metrics.csv").unlink()
    for step in (2, 3):
        logger.write(step, {"loss": 0.5})
    assert not logger.flush(60)
    logger.close("completed")
    assert logger.failures == {"CSVToolLogger": 2}
    assert "CSVToolLogger failed: ToolProcessError: FileNotFoundError" in caplog.text


@pytest.mark.integration
def test_a_process_that_is_killed_is_reported_with_what_it_lost(tmp_path):
    tool = ToolProcess(CSVConfig(), tmp_path)
    tool.write(1, {"loss": 0.5})
    tool.flush()
    os.kill(tool._process.pid, signal.SIGSTOP)
    for step in range(5):
        tool.write(step, {"loss": 0.5})
    os.kill(tool._process.pid, signal.SIGKILL)
    wait_until(lambda: tool._has_ended)
    with pytest.raises(ToolProcessError, match="CSVToolLogger.*-9") as error:
        tool.flush()
    assert error.value.entries == 5
    with pytest.raises(ToolProcessError, match="CSVToolLogger"):
        tool.close("completed")


@pytest.mark.integration
def test_a_signal_to_all_processes_of_a_job_leaves_its_tools_to_the_run(tmp_path):
    tool = ToolProcess(CSVConfig(), tmp_path)
    tool.write(1, {"loss": 0.5})
    tool.flush()
    for number in STOP_SIGNALS:  # as SLURM sends it: to every process of the step
        os.kill(tool._process.pid, number)
    tool.write(2, {"loss": 0.5})
    tool.close("interrupted")
    assert len(lines_in(tmp_path)) == 3


@pytest.mark.integration
def test_a_tool_that_is_behind_makes_its_thread_wait_and_not_its_memory_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.process.MOST_UNANSWERED", 20)
    tool = ToolProcess(CSVConfig(), tmp_path)
    for step in range(200):
        tool.write(step, {"loss": 0.5})
        assert len(tool._unanswered) <= 20
    tool.close("completed")
    wait_for_processes(tmp_path)
    assert len(lines_in(tmp_path)) == 201


@pytest.mark.integration
def test_the_tool_of_a_killed_training_writes_everything_and_that_of_the_resumed_one_waits_for_it(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    after = ToolProcess(CSVConfig(), tmp_path)
    after.write(500, {"loss": 0.25})
    after.flush()
    after.close("completed")
    assert [line.split(",")[0] for line in lines_in(tmp_path)] == ["step", *map(str, range(501))]


@pytest.mark.integration
def test_a_tool_that_closes_slowly_does_not_hold_up_the_run(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("jax_trainer.logger.process.CLOSING_SECONDS", 0.01)
    tool = ToolProcess(CSVConfig(), tmp_path)  # is still starting
    tool.write(1, {"loss": 0.5})
    began = time.perf_counter()
    tool.close("completed")
    assert time.perf_counter() - began < 1
    assert "CSVToolLogger is still writing" in caplog.text
    wait_until(lambda: tool._has_ended, 60)
    assert lines_in(tmp_path) == ["step,loss", "1,0.5"]
