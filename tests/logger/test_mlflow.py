"""What MLflow (`make integrations` installs it) has of a run, and knows nothing else."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest

from jax_trainer.logger import MLflowConfig
from jax_trainer.logger.values import bins_of
from tests.logger.logger_runs import FLAT, PIXELS, image_in, log_everything, logger_with
from tests.logger.tool_files import shown

pytestmark = pytest.mark.integration
CANARY = "CANARY-3b90"
BINS = bins_of(np.linspace(0, 3, 300))
CURVES = {"train/loss_step": [(50, 0.5)], "val/loss": [(70, 0.25)], "mine/value": [(7, 0.125)]}
QUIET = """
import logging, os, random, signal, sys, threading
from pathlib import Path
import numpy as np
from jax_trainer.logger import Logger, LoggerConfig, MLflowConfig

def state():
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hooks = [os.fork, sys.excepthook, threading.excepthook, sys.stdout, sys.stderr]
    root = logging.getLogger()
    return [random.getstate(), str(np.random.get_state()), *signals, *hooks, root.level, *root.handlers, os.getcwd()]

before = state()
logger = Logger(LoggerConfig(tool_config=MLflowConfig(experiment_name="digits")), Path(sys.argv[1]))
logger.write(1, {"loss": 0.5})
logger.log_text("notes", "a", step=1)
assert logger.flush(60)
logger.close("completed")
assert logger.failures == {}
assert state() == before
"""
DIGITS = MLflowConfig(experiment_name="digits", run_name="mine", tags={"a": "b"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an entry of every kind, in a process that knows secrets."""
    found = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*sys.argv, f"--token={CANARY}"])
        patch.setenv("DB_PASSWORD", CANARY)
        logger = logger_with(found, DIGITS)
        log_everything(logger)
        assert logger.flush(60)
        logger.close("completed")
    assert logger.failures == {}
    return found


def test_curves_are_as_they_were_logged(folder):
    curves, pictures = shown("mlflow", folder)
    assert {name: curves[name] for name in CURVES} == CURVES
    assert 1 in pictures


def test_nothing_is_known_of_the_process(folder):
    written = [file for file in folder.rglob("*") if file.is_file() and file.name != "run.log"]
    for secret in (CANARY, str(Path.cwd()), sys.executable, "killed_job"):
        assert not any(secret.encode() in file.read_bytes() for file in written)


def test_mlflow_prints_nothing_and_leaves_the_process_as_it_is(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", QUIET, str(tmp_path / "run")],
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("", "")
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_files_stay_in_the_folder(folder):
    ours = {"metrics.jsonl", "metrics", "media", "run.log"}
    assert {file.name for file in folder.iterdir()} == {*ours, "mlflow", "mlflow-id.txt"}


def test_without_the_package_one_sentence_says_what_to_install(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    logger = logger_with(tmp_path, DIGITS)
    [message] = [record.message for record in caplog.records]  # before anything is logged
    assert "jax-trainer[mlflow]" in message
    logger.close("completed")


def test_a_process_that_was_killed_while_the_database_was_created_leaves_none_that_is_broken(tmp_path):
    (tmp_path / ".mlflow.partial").mkdir(parents=True)
    with closing(sqlite3.connect(tmp_path / ".mlflow.partial" / "mlflow.db")) as database, database:
        database.execute("CREATE TABLE experiments (name TEXT)")
    logger = logger_with(tmp_path, DIGITS)
    logger.write(1, {"loss": 0.5})
    assert logger.flush(60)
    logger.close("completed")
    assert (logger.failures, shown("mlflow", tmp_path)[0]) == ({}, {"loss": [(1, 0.5)]})
    assert not (tmp_path / ".mlflow.partial").exists()


def test_a_resumed_run_has_the_points_before_the_checkpoint_that_a_kill_has_lost(tmp_path):
    logger = logger_with(tmp_path, DIGITS)
    for step in (2, 4, 6):
        logger.write(step, {"loss": step / 2})
    mark = logger.mark()()
    assert logger.flush(60)
    logger.close("failed")
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database, database:
        database.execute("DELETE FROM metrics WHERE step > 2")
        database.execute("UPDATE latest_metrics SET step = 2, value = 1.0")
    logger = logger_with(tmp_path, DIGITS)
    logger.cut(mark, 6)
    logger.write(8, {"loss": 4.0})
    assert logger.flush(60)
    logger.close("completed")
    assert shown("mlflow", tmp_path)[0] == {"loss": [(2, 1.0), (4, 2.0), (6, 3.0), (8, 4.0)]}


def test_mlflow_has_pictures_texts_histograms_and_parameters(folder):
    run = (folder / "mlflow-id.txt").read_text().strip()
    [artifacts] = folder.glob(f"mlflow/mlruns/*/{run}/artifacts")
    np.testing.assert_array_equal(image_in(artifacts / "media" / "val_example_1.png"), PIXELS)
    assert image_in(artifacts / "media" / "val_curve_1.png").shape[:2] == (40, 60)
    assert (artifacts / "text" / "notes_3.txt").read_text() == "a <b> & c"
    assert json.loads((artifacts / "histograms" / "param_kernel_2.json").read_text())["counts"] == BINS.counts
    with closing(sqlite3.connect(folder / "mlflow" / "mlflow.db")) as database:
        params = dict(database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)))
        [(name, status)] = database.execute("SELECT name, status FROM runs")
        tags = dict(database.execute("SELECT key, value FROM tags"))
    assert params == {key: str(value) for key, value in FLAT.items()}
    assert (name, status, tags) == ("mine", "FINISHED", {"a": "b", "mlflow.runName": "mine"})
    assert shown("mlflow", folder)[0]["hparam/test/acc"] == [(7, 0.75)]


def test_a_file_store_of_mlflow_has_every_point_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else it refuses
    config, marks = MLflowConfig(tracking_uri=(tmp_path / "store").as_uri()), []
    for start in (2, 4):
        logger = logger_with(tmp_path / "run", config)
        if marks:
            logger.cut(marks[0], 2)
        for step in range(start, 8, 2):
            logger.write(step, {"train/loss": step / 2})
            marks.append(logger.mark()())
        assert logger.flush(60)
        logger.close("completed")
        assert logger.failures == {}
    [file] = (tmp_path / "store").glob("*/*/metrics/train/loss")
    assert [line.split()[1:] for line in file.read_text().splitlines()] == [["1.0", "2"], ["2.0", "4"], ["3.0", "6"]]


class MLflowServer:
    """A real server, asked over HTTP."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        host, port = self.address.removeprefix("http://").split(":")
        command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", port, "--workers", "1"]
        stores = [
            "--backend-store-uri",
            f"sqlite:///{folder}/server.db",
            "--artifacts-destination",
            str(folder / "kept"),
        ]
        self._log = (folder / "server.log").open("wb")
        self.process = subprocess.Popen([*command, *stores], stdout=self._log, stderr=self._log, start_new_session=True)

    def ask(self, page: str, **query: str) -> Any:
        with urlopen(f"{self.address}/api/2.0/mlflow/{page}?{urlencode(query)}", timeout=30) as answer:
            return json.loads(answer.read())

    def history(self, run: str, key: str) -> Any:
        return self.ask("metrics/get-history", run_id=run, metric_key=key)["metrics"]

    def wait(self) -> None:
        for _ in range(1200):
            try:
                with urlopen(f"{self.address}/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.1)
        raise AssertionError("timeout")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MLflowServer]:
    """An MLflow server on the loopback."""
    (tmp_path / "server").mkdir()
    started = MLflowServer(tmp_path / "server")
    try:
        started.wait()
        yield started
    finally:
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
        started._log.close()


def test_a_server_of_mlflow_has_every_point_once(server, tmp_path, capfd):
    config = MLflowConfig(tracking_uri=server.address, experiment_name="digits")
    first = logger_with(tmp_path / "run", config)
    for step in (2, 4):
        first.write(step, {"epoch": 1, "train/loss": step / 2, "bad": float("nan")})
    assert first.flush(120)
    mark = first.mark()()
    for step in (6, 8):
        first.write(step, {"epoch": 2, "train/loss": step / 2, "bad": float("nan"), "val/time": 0.1})
    first.log_image("val/example", PIXELS, step=8)
    first.flush(60)
    first.close("failed")
    run = (tmp_path / "run" / "mlflow-id.txt").read_text().strip()
    assert server.ask("runs/get", run_id=run)["run"]["info"]["status"] == "FAILED"

    second = logger_with(tmp_path / "run", config)
    second.cut(mark, 4)
    for step in (6, 8, 10):  # the same bits, but for a time
        second.write(step, {"epoch": 2, "train/loss": step / 2, "bad": float("nan"), "val/time": 0.2})
    second.log_image("val/example", PIXELS, step=8)
    second.log_hparams({"lr": 0.1})
    assert second.flush(120)
    second.close("completed")
    assert (tmp_path / "run" / "mlflow-id.txt").read_text().strip() == run
    asked = {
        key: [
            (point["step"], point["value"])
            for point in server.ask("metrics/get-history", run_id=run, metric_key=key)["metrics"]
        ]
        for key in ("train/loss", "bad", "val/time")
    }
    assert sorted(asked["train/loss"]) == [(2, 1.0), (4, 2.0), (6, 3.0), (8, 4.0), (10, 5.0)]
    assert [step for step, _ in sorted(asked["bad"])] == [2, 4, 6, 8, 10]
    assert sorted(asked["val/time"]) == [(6, 0.1), (6, 0.2), (8, 0.1), (8, 0.2), (10, 0.2)]  # both are shown
    found = server.ask("runs/get", run_id=run)["run"]
    assert (found["info"]["status"], found["data"]["params"]) == ("FINISHED", [{"key": "lr", "value": "0.1"}])
    files = server.ask("artifacts/list", run_id=run, path="media")["files"]
    assert [file["path"] for file in files] == ["media/val_example_8.png"]
    assert capfd.readouterr() == ("", "")
