import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
from compoconf import parse_config

from jax_trainer.logger import LoggerConfig, TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.values import bins_of
from tests.logger.event_files import events_in, scalars_in, values_in
from tests.logger.faulty_tools import threads_of_tools
from tests.logger.logger_runs import FLAT, log_everything, logger_with, train_two_epochs
from tests.logger.tensorboard_server import asking_tensorboard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, with an entry of every kind after it."""
    folder = tmp_path_factory.mktemp("tensorboard")
    logger = logger_with(folder, TensorboardConfig())
    train_two_epochs(logger)
    for epoch in (0, 1, 2):  # as `LearningRateMonitor` does
        logger.write(4 * epoch, {"epoch": epoch, "optimizer/lr": 0.1})
    log_everything(logger)
    logger.close("completed")
    assert logger.failures == {}
    return folder


def test_training_and_validation_share_the_step_as_their_x_axis(folder):
    shown = scalars_in(folder)
    for tag in ("train/acc_step", "optimizer/grad_global_norm_step"):
        assert [x for x, _ in shown[tag]] == [2, 4, 6, 8]
    for tag in ("train/acc_epoch", "train/time_epoch", "optimizer/grad_global_norm_max_epoch", "val/acc", "val/time"):
        assert [x for x, _ in shown[tag]] == [4, 8]
    assert [x for x, _ in shown["optimizer/lr"]] == [0, 4, 8]
    assert {(4, 1), (8, 2)} <= set(shown["epoch"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["epoch"]) for row in rows if "val/acc" in row] == [(4, 1), (8, 2)]
    for tag, points in shown.items():
        if not tag.startswith("hparam/"):
            assert [y for _, y in points] == pytest.approx([row[tag] for row in rows if tag in row], rel=1e-6)


def test_pictures_histograms_and_texts_are_read_back(folder):
    shown = values_in(folder)
    [(x, image)] = shown["val/example"]
    assert (x, image.image.height, image.image.width, image.image.colorspace) == (1, 4, 5, 3)
    assert image.image.encoded_image_string == (folder / "media" / "val_example_1.png").read_bytes()
    [(x, figure)] = shown["val/curve"]
    assert (x, figure.image.height, figure.image.width) == (1, 40, 60)
    [(x, histogram)] = shown["param/kernel"]
    bins = bins_of(np.linspace(0, 3, 300))
    assert (x, list(histogram.histo.bucket), list(histogram.histo.bucket_limit)) == (2, [0, *bins.counts], bins.edges)
    whole = histogram.histo
    assert (whole.num, whole.min, whole.max, whole.sum) == (300, 0, 3, pytest.approx(450))
    [(x, text)] = shown["notes"]
    assert (x, text.tensor.string_val[0].decode()) == (3, "a <b> & c")


def test_a_histogram_of_nothing_finite_is_one(tmp_path):
    tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
    for values in (np.zeros(0), np.full(3, np.nan), np.array([np.inf, 1.0])):
        tool.histogram(1, "h", values)
    tool.close("completed")
    assert [value.histo.num for _, value in values_in(tmp_path)["h"]] == [0, 0, 1]


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Callable[..., Any]]:
    """Asks the real TensorBoard what it shows."""
    with asking_tensorboard(folder, until="hparam/test/acc") as ask:
        yield ask


def test_tensorboard_shows_all_tags(ask):
    shown = {tag for tag in ask("scalars/tags")["."] if "_global_norm_" not in tag and "throughput/" not in tag}
    assert shown == {
        *("train/loss_step", "train/acc_step", "train/loss_epoch", "train/acc_epoch", "train/time_epoch"),
        *("val/loss", "val/acc", "val/time", "optimizer/lr", "mine/value", "hparam/test/acc", "epoch"),
    }
    assert set(ask("images/tags")["."]) == {"val/example", "val/curve"}
    assert set(ask("histograms/tags")["."]) == {"param/kernel"}
    assert ask("text/tags")["."] == ["notes"]


def test_tensorboard_shows_all_curves_over_the_steps(ask):
    xs = lambda tag: [x for _, x, _ in ask("scalars/scalars", run=".", tag=tag)]
    assert xs("train/loss_step") == [2, 4, 6, 8, 50]
    assert xs("train/loss_epoch") == [4, 8]
    assert xs("val/loss") == [4, 8, 70]
    assert xs("optimizer/lr") == [0, 4, 8]


def test_tensorboard_shows_pictures_and_texts(ask, folder):
    [image] = ask("images/images", run=".", tag="val/example", sample="0")
    png = ask("images/individualImage", **dict(parse_qsl(image["query"])))
    assert (image["step"], png) == (1, (folder / "media" / "val_example_1.png").read_bytes())
    [text] = ask("text/text", run=".", tag="notes")
    assert (text["step"], "a &lt;b&gt; &amp; c" in text["text"]) == (3, True)
    [[_, x, bins]] = ask("histograms/histograms", run=".", tag="param/kernel")
    assert (x, sum(count for _, _, count in bins)) == (2, 300)


def test_tensorboard_shows_hyperparameters_with_final_metrics(ask):
    request = {"experimentName": "", "allowedStatuses": ["STATUS_SUCCESS"], "startIndex": 0, "sliceSize": 9}
    wanted = [{"metric": {"tag": "hparam/test/acc", "group": ""}}]
    names = [name for name, value in FLAT.items() if value is not None]
    columns = [*({"hparam": name} for name in names), *wanted]
    [group] = ask("hparams/session_groups", post={**request, "colParams": columns})["sessionGroups"]
    assert group["hparams"] == {name: FLAT[name] for name in names}
    assert [metric["value"] for metric in group["metricValues"]] == [0.75]


def test_files_begin_as_tensorboard_expects_and_never_overwrite_each_other(tmp_path):
    for step in (1, 2):  # within a second
        tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
        tool.write(step, {"x": step, "bad": math.nan, "huge": math.inf})
        tool.close("completed")
    assert [event.file_version for event in events_in(tmp_path)] == ["brain.Event:2", "", "brain.Event:2", ""]
    assert scalars_in(tmp_path)["x"] == [(1, 1.0), (2, 2.0)]
    assert scalars_in(tmp_path)["huge"] == [(1, math.inf), (2, math.inf)]
    assert all(math.isnan(y) for _, y in scalars_in(tmp_path)["bad"])


def test_numbers_are_on_the_disk_before_the_end(tmp_path):
    tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
    tool.write(1, {"x": 1.0})
    assert scalars_in(tmp_path)["x"] == [(1, 1.0)]
    tool.close("completed")


@pytest.mark.parametrize(
    "afterwards", ["", pytest.param("import torch  # can be imported as well", marks=pytest.mark.integration)]
)
@pytest.mark.integration
def test_writing_for_tensorboard_imports_neither_torch_nor_comet(tmp_path, afterwards):
    code = f"""
import sys
from pathlib import Path
from jax_trainer.logger.tensorboard import TensorboardConfig, TensorboardToolLogger
tool = TensorboardToolLogger(TensorboardConfig(), Path({str(tmp_path)!r}))
tool.write(1, {{"x": 1.0}})
tool.hparams(1, {{"rate": 0.1}}, {{"loss": 2.0}})
tool.close("completed")
print({"torch", "comet_ml"} & sys.modules.keys())
{afterwards}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"


def test_without_tensorboardx_one_sentence_says_what_to_install(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    logger = logger_with(tmp_path, TensorboardConfig())
    (message,) = [record.message for record in caplog.records]  # before anything is logged
    assert all(word in message for word in ("TensorboardToolLogger", "tensorboardX", "jax-trainer[tensorboard]"))
    assert "metrics.jsonl" in message
    logger.write(1, {"x": 1.0})
    assert threads_of_tools() == ["jax-trainer log JSONLToolLogger"]
    logger.close("completed")


def test_a_file_that_is_deleted_is_reported(tmp_path, caplog):
    logger = logger_with(tmp_path / "run", TensorboardConfig())
    logger.write(1, {"x": 1.0})
    assert logger.flush()
    shutil.rmtree(tmp_path / "run")
    logger.write(2, {"x": 1.0})
    logger.close("completed")
    assert logger.failures == {"JSONLToolLogger": 1, "TensorboardToolLogger": 1}
    assert "TensorboardToolLogger failed: FileNotFoundError" in caplog.text


def test_a_full_disk_is_reported(tmp_path, caplog):
    tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tool._file._py_recordio_writer._writer.fileno())
    os.close(full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            tool.write(1, {"x": 1.0})
    with pytest.raises(OSError, match="No space left"):
        tool.close("completed")


def test_the_section_of_the_seed_document_is_read():
    section = {"name": "", "save_dir": "tests/checkpoints/", "use_timestamp_version": False, "version": "0"}
    config: Any = parse_config(LoggerConfig, {"tool_config": {"class_name": "TensorboardToolLogger", **section}})
    assert config.tool_config == TensorboardConfig(**section)
