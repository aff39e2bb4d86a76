"""What MLflow, Comet, trackio and ClearML (`make integrations` installs them) have of a run, and know nothing else."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
from logger_runs import FLAT, PIXELS, image_in, log_everything, logger_with
from tool_files import shown, wait_for_processes

from jax_trainer.logger import ClearMLConfig, CometConfig, MLflowConfig, TrackioConfig
from jax_trainer.logger.values import bins_of

pytestmark = pytest.mark.integration
CANARY = "CANARY-3b90"
COMET = ("file_upload", "parameter_msg", "log_other")  # kinds of its messages
BINS = bins_of(np.linspace(0, 3, 300))
CURVES = {"train/loss_step": [(50, 0.5)], "val/loss": [(70, 0.25)], "mine/value": [(7, 0.125)]}
TOOLS = {
    "mlflow": MLflowConfig(experiment_name="digits", run_name="mine", tags={"a": "b"}),
    "comet": CometConfig(project="digits", name="mine", tags=["a", "b"], mode="offline"),
    "trackio": TrackioConfig(project="digits", name="mine"),
    "clearml": ClearMLConfig(project="digits", name="mine", tags=["a", "b"], mode="offline"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with an entry of every kind, begun in a process that knows secrets, by tool."""
    found: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*sys.argv, f"--token={CANARY}"])
        patch.setenv("DB_PASSWORD", CANARY)
        for name, config in TOOLS.items():
            found[name] = tmp_path_factory.mktemp(name)
            logger = logger_with(found[name], config)
            log_everything(logger)
            assert logger.flush(60)
            logger.close("completed")
            assert logger.failures == {}
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_curves_are_as_they_were_logged(tool, folders):
    curves, pictures = shown(tool, folders[tool])
    assert {name: curves[name] for name in CURVES} == CURVES
    assert 1 in pictures


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_known_of_the_process_and_nothing_is_printed(tool, folders, tmp_path, capfd):
    wait_for_processes(folders[tool])
    written = [file for file in folders[tool].rglob("*") if file.is_file() and file.name != "run.log"]
    texts = [file.read_bytes() for file in written if file.suffix != ".zip"]
    for archive in [file for file in written if file.suffix == ".zip"]:
        with zipfile.ZipFile(archive) as opened:
            texts += [opened.read(name) for name in opened.namelist()]
    for secret in (CANARY, str(Path.cwd()), sys.executable, "killed_job"):
        assert not any(secret.encode() in text for text in texts)
    logger = logger_with(tmp_path, TOOLS[tool])
    logger.write(1, {"loss": 0.5})
    assert logger.flush(60)
    logger.close("completed")
    wait_for_processes(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("tool", TOOLS)
def test_files_stay_in_the_folder(tool, folders):
    ours = {"metrics.jsonl", "metrics", "media", "run.log"}
    found = {file.name for file in folders[tool].iterdir() if not file.name.startswith(".")}
    assert found == {*ours, tool, f"{tool}-id.txt"}


@pytest.mark.parametrize("tool", TOOLS)
def test_without_the_package_one_sentence_says_what_to_install(tool, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml" if tool == "comet" else tool, None)
    logger = logger_with(tmp_path, TOOLS[tool])
    [message] = [record.message for record in caplog.records]  # before anything is logged
    assert f"jax-trainer[{tool}]" in message
    logger.close("completed")


def test_mlflow_has_pictures_texts_histograms_and_parameters(folders):
    folder = folders["mlflow"]
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


def test_comet_has_pictures_texts_histograms_and_parameters(folders):
    [archive] = (folders["comet"] / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        about = json.loads(opened.read("experiment.json"))
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
        payloads = {kind: [one["payload"] for one in messages if one["type"] == kind] for kind in COMET}
        uploads = [(one["upload_type"], one["additional_params"], one["file_path"]) for one in payloads["file_upload"]]
        files = {params.get("figName", kind): (params["step"], opened.read(path)) for kind, params, path in uploads}
    key = (folders["comet"] / "comet-id.txt").read_text().strip()
    assert (about["offline_id"], about["project_name"], sorted(about["tags"])) == (key, "digits", ["a", "b"])
    assert files["val/example"] == (1, (folders["comet"] / "media" / "val_example_1.png").read_bytes())
    assert files["val/curve"] == (1, (folders["comet"] / "media" / "val_curve_1.png").read_bytes())
    assert files["text-sample"] == (3, b"a <b> & c")
    step, histogram = files["histogram3d"]
    assert (step, sum(count for _, count in json.loads(histogram)["index_values"])) == (2, 300)
    params = {one["param"]["paramName"]: one["param"]["paramValue"] for one in payloads["parameter_msg"]}
    assert {name: params[name] for name in FLAT} == FLAT
    others = {one["key"]: one["value"] for one in payloads["log_other"]}
    assert (others["test/acc"], others["Name"]) == (0.75, "mine")


def test_trackio_has_pictures_texts_histograms_and_parameters(folders):
    folder = folders["trackio"] / "trackio"
    with closing(sqlite3.connect(folder / "digits.db")) as database:
        rows = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics")]
        [(run, config)] = database.execute("SELECT run_name, config FROM configs")
    by_name = {name: value for row in rows for name, value in row.items()}
    np.testing.assert_array_equal(image_in(folder / "media" / by_name["val/example"]["file_path"])[..., :3], PIXELS)
    assert image_in(folder / "media" / by_name["val/curve"]["file_path"]).shape[:2] == (40, 60)
    assert (by_name["notes"]["_value"], by_name["param/kernel"]["values"]) == ("a <b> & c", BINS.counts)
    known = json.loads(config)
    assert {name: known[name] for name in FLAT} == FLAT
    assert known["_Username"] is None and set(known) - set(FLAT) == {"_Username", "_Created", "_Group"}
    assert run.startswith("mine-") and by_name["hparam/test/acc"] == 0.75


def test_clearml_has_pictures_texts_histograms_and_parameters(folders):
    wait_for_processes(folders["clearml"])
    [archive] = folders["clearml"].glob("clearml/offline/*.zip")
    with zipfile.ZipFile(archive) as opened:
        task = json.loads(opened.read("task.json"))
        events = [one for line in opened.read("metrics.jsonl").splitlines() for one in json.loads(line)]
        texts = [one["msg"] for line in opened.read("log.jsonl").splitlines() for one in json.loads(line)]
        images = [name for name in opened.namelist() if name.endswith(".png")]
    assert task["id"] == (folders["clearml"] / "clearml-id.txt").read_text().strip()
    assert (task["name"], task["project_name"], {*task["tags"]}) == ("mine", "digits", {"a", "b"})
    assert "script" not in task or not any(task["script"].values())
    params = {one["name"]: one["value"] for one in task["hyperparams"]["General"].values()}
    assert params == {name: "" if value is None else str(value) for name, value in FLAT.items()}
    assert any("val.slash.example" in name for name in images) and any("val.slash.curve" in name for name in images)
    assert any("notes (step 3): a <b> & c" in text for text in texts)
    plots = [one for one in events if one["type"] == "plot"]
    assert ("param/kernel", 2) in {(one["metric"], one["iter"]) for one in plots}
    assert [one["value"] for one in events if one.get("variant") == "test/acc"] == [0.75]


def test_an_error_that_trackio_only_warns_of_is_counted(tmp_path, caplog):
    (tmp_path / "trackio" / "digits.db").mkdir(parents=True)
    logger = logger_with(tmp_path, TOOLS["trackio"])
    logger.write(1, {"loss": 0.5})
    logger.flush(60)
    logger.close("completed")
    assert logger.failures.keys() == {"TrackioToolLogger"}
    assert "trackio" in caplog.text and "digits" in caplog.text


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
        wait_for_processes(tmp_path / "run")
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


def test_a_server_of_mlflow_has_every_point_once(server, tmp_path):
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
    wait_for_processes(tmp_path / "run")
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
    wait_for_processes(tmp_path / "run")
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
