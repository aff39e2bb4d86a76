import io
import json
import socket
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compoconf import Registry, parse_config

from jax_trainer.logger import (
    Logger,
    LoggerConfig,
    ToolLoggerInterface,
    WandBConfig,
    WandbConfig,
    WandBToolLogger,
    WandbToolLogger,
)
from jax_trainer.logger.values import bins_of
from tests.logger.logger_runs import FLAT, PIXELS, image_in, log_everything, logger_with
from tests.logger.wandb_files import WandbFile
from tests.rows import noted_row

CANARY = "CANARY-7d21"


@pytest.fixture(scope="session")
def shown(offline_wandb: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WandbFile]:
    """A run with an entry of every kind, begun in a process that knows secrets, and its file."""
    folder = tmp_path_factory.mktemp("wandb-run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*sys.argv, f"--token={CANARY}"])
        patch.setenv("DB_PASSWORD", CANARY)
        tool = WandBConfig(mode="offline", project="tests", name="mine", group="all", tags=["a", "b"])
        logger = logger_with(folder, tool)
        log_everything(logger)
        assert logger.flush(30)
        logger.close("completed")
    assert logger.failures == {}
    import_module("wandb").teardown()  # its service writes a little longer
    return folder, WandbFile(folder)


def own(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our warnings; wandb keeps a diary of its own."""
    return [record.message for record in caplog.records if record.name == "jax_trainer" and record.levelno > 20]


def logged(file: WandbFile, name: str) -> dict[str, Any]:
    [row] = [row for row in file.history() if name in row]
    return row


def test_all_numbers_share_the_step_as_their_x_axis(shown):
    _, file = shown
    assert file.history()[:3] == [
        {"axis/step": 50, "epoch": 1, "train/loss_step": 0.5},
        {"axis/step": 70, "epoch": 1, "val/loss": 0.25},
        {"axis/step": 7, "mine/value": 0.125},
    ]
    names = ("train/loss_step", "val/loss", "epoch", "mine/value", "val/example")
    assert {file.axes()[name] for name in names} == {"axis/step"}


def test_pictures_are_shown_pixel_by_pixel(shown):
    _, file = shown
    image = file.files / logged(file, "val/example")["val/example"]["path"]
    np.testing.assert_array_equal(image_in(image), PIXELS)
    curve = logged(file, "val/curve")
    assert (curve["val/curve"]["width"], curve["val/curve"]["height"], curve["axis/step"]) == (60, 40, 1)


def test_histograms_texts_and_hyperparameters_are_shown(shown):
    _, file = shown
    bins = bins_of(np.linspace(0, 3, 300))
    histogram = logged(file, "param/kernel")["param/kernel"]
    assert (histogram["values"], histogram["bins"]) == (bins.counts, pytest.approx(bins.edges))
    text = logged(file, "notes")["notes"]
    assert (file.files / text["path"]).read_text() == "<pre>a &lt;b&gt; &amp; c</pre>"
    assert {name: file.config()[name] for name in FLAT} == FLAT
    assert file.summary()["test/acc"] == 0.75


def test_the_run_is_called_as_configured_and_ends_well(shown):
    _, file = shown
    run = file.run
    assert (run.display_name, run.project, run.run_group, list(run.tags)) == ("mine", "tests", "all", ["a", "b"])
    assert file.exit_code == 0


def test_files_stay_in_the_folder_and_tell_nothing_of_the_process(shown):
    folder, file = shown
    assert {path.name for path in folder.iterdir()} == {
        *("metrics.jsonl", "metrics", "media", "run.log", "wandb", "wandb-id.txt")
    }
    assert not any(path.is_symlink() for path in (folder / "wandb").iterdir())
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert set(file.config()) == set(FLAT)  # nothing of the environment or the machine
    assert file.run.host == "unknown"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What wandb would be asked to begin."""
    wandb, asked = import_module("wandb"), {}
    for name in ("setup", "termsetup"):
        monkeypatch.setattr(wandb, name, lambda *_: None)
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or SimpleNamespace(url=""))
    return asked


def test_a_resumed_run_is_the_same_one_of_wandb(shown, asked):
    folder, file = shown
    WandbToolLogger(WandbConfig(), folder)
    assert (asked["id"], asked["resume"]) == (file.run.run_id, "allow")


@pytest.mark.integration
def test_metrics_have_the_chosen_axis_and_a_rollback_leaves_one_run(offline_wandb, tmp_path):
    config = LoggerConfig(tool_config=WandBConfig(mode="offline"), x_axis="epoch")
    logger = Logger(config, tmp_path)
    logger.count(2, 1)
    logger.write(2, {"epoch": 1, "val/loss": 0.5, "train/loss": 0.25})
    mark = logger.mark()()
    logger.write(4, {"epoch": 2, "val/loss": 9.0})
    assert logger.flush(30)
    logger.cut(mark, 2)
    logger.write(4, {"epoch": 2, "val/loss": 0.1})
    assert logger.flush(30)
    logger.close("completed")
    import_module("wandb").teardown()
    file = WandbFile(tmp_path)
    assert (file.axes()["val/loss"], file.axes()["train/loss"]) == ("axis/epoch", "axis/epoch")
    rows = [row for row in file.history() if "val/loss" in row]
    assert [(row["axis/epoch"], row["val/loss"]) for row in rows] == [(1, 0.5), (2, 0.1)]


def test_an_id_that_is_none_is_replaced(tmp_path_factory: pytest.TempPathFactory, asked):
    for text in ["", "../../x", "a" * 65, "\0", "two words"]:
        with noted_row(text):
            tmp_path = tmp_path_factory.mktemp("row")
            (tmp_path / "wandb-id.txt").write_text(text)
            WandBToolLogger(WandBConfig(), tmp_path)
            assert asked["id"] == (tmp_path / "wandb-id.txt").read_text().strip() != text
            assert (asked["mode"], asked["name"]) == (None, tmp_path.name)


def test_a_run_can_be_disabled(offline_wandb, tmp_path):
    logger = logger_with(tmp_path, WandbConfig(mode="disabled"))
    log_everything(logger)
    logger.close("completed")
    assert logger.failures == {}
    assert not (tmp_path / "wandb").exists()


def test_without_an_account_wandb_neither_asks_nor_waits(offline_wandb, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n"))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    import_module("wandb").termsetup(import_module("wandb").Settings(), None)  # as if somebody had used it before
    began = time.perf_counter()
    logger = logger_with(tmp_path, WandBConfig(mode="online"))
    logger.write(1, {"loss": 0.5})
    logger.close("completed")
    assert time.perf_counter() - began < 5
    assert logger.failures == {"WandBToolLogger": 2}
    assert own(caplog)[0].startswith("WandBToolLogger failed: UsageError: No API key configured.")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_a_dead_network_costs_a_warning(offline_wandb, tmp_path, caplog, monkeypatch):
    wandb = import_module("wandb")
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # takes connections and never answers
        wandb.teardown()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        logger = logger_with(tmp_path, WandBConfig(mode="online", timeout=0.5))
        logger.write(1, {"loss": 0.5})
        logger.close("completed")
        wandb.teardown()
    assert logger.failures.keys() == {"WandBToolLogger"}
    assert len(own(caplog)) == 2  # one, and the counts
    assert "0" * 40 not in caplog.text


def test_without_wandb_one_sentence_says_what_to_install(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = logger_with(tmp_path, WandBConfig())
    [said] = [record.message for record in caplog.records]  # before anything is logged
    assert said.startswith("WandBToolLogger failed: MissingExtraError") and "'jax-trainer[wandb]'" in said
    assert not any("wandb" in thread.name.lower() for thread in threading.enumerate() if "jax-trainer" in thread.name)
    logger.close("completed")


def test_both_spellings_can_be_named_in_a_file():
    for name in ["WandBToolLogger", "WandbToolLogger"]:
        with noted_row(name):
            config: Any = parse_config(LoggerConfig, {"tool_config": {"class_name": name, "project": "p"}})
            assert config.tool_config.project == "p"
            kind = Registry.get_class(ToolLoggerInterface, config.tool_config.class_name)  # type: ignore[arg-type]
            assert kind.__name__ == name and issubclass(kind, WandBToolLogger)


def test_the_configuration_of_the_seed_has_its_defaults():
    for config in (WandBConfig(), WandbConfig()):
        values = (config.save_dir, config.version, config.name, config.project, config.entity)
        assert values == ("", "", None, None, None)
        assert config.use_timestamp_version is None  # a timestamp, because the version is empty
    assert issubclass(WandbToolLogger, WandBToolLogger)
