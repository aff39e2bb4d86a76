"""Loggers of Lightning get what the run folder's own record has."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jax_trainer.callbacks import LightningLogger
from jax_trainer.logger import LoggerConfig
from jax_trainer.trainer import ImgClassifierTrainer
from tests.trainer.trainer_runs import SGD, LinearConfig, digits


class Recorder:
    """The methods of a logger of Lightning, and what they were called with."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.params: Any = None
        self.status = ""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any) -> None:
        self.params = params

    def finalize(self, status: str) -> None:
        self.status = status


def trained(**options: Any) -> Path:
    data = digits()
    model = LinearConfig(num_classes=10)
    trainer = ImgClassifierTrainer(
        model_config=model, optimizer_config=SGD, dataset=data, train_epochs=2, enable_progress_bar=False, **options
    )
    trainer.train_model(data.train_loader, data.val_loader)
    assert trainer.logger is not None
    return trainer.logger.log_dir


def recorded(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [(row.pop("step"), row) for row in lines if "train/loss_epoch" in row or "val/loss" in row]
    return [(step, {name: value for name, value in row.items() if "time" not in name}) for step, row in rows]


def test_a_lightning_logger_gets_the_rows_the_configuration_and_the_end_of_a_run(tmp_path):
    logger = Recorder()
    folder = trained(callbacks=[LightningLogger(logger)], logger=LoggerConfig(log_dir=str(tmp_path)))
    rows = [(step, {name: value for name, value in row.items() if "time" not in name}) for step, row in logger.rows]
    assert [row for row in rows if "train/loss_step" not in row[1]] == recorded(folder)
    assert logger.params == yaml.safe_load((folder / "config.yaml").read_text())
    assert logger.status == "success"


def test_what_has_no_methods_of_a_lightning_logger_is_refused():
    with pytest.raises(TypeError, match=r"log_metrics, log_hyperparams, finalize.*got 'runs'"):
        LightningLogger("runs")


@pytest.mark.integration
def test_the_csv_logger_of_lightning_is_passed_as_the_logger(tmp_path, monkeypatch):
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="`make integrations` installs Lightning")
    monkeypatch.chdir(tmp_path)
    folder = trained(logger=loggers.CSVLogger(tmp_path / "lightning", name="digits"))
    with (tmp_path / "lightning" / "digits" / "version_0" / "metrics.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["val/loss"]]
    assert [float(row["val/loss"]) for row in found] == [
        row["val/loss"] for _, row in recorded(folder) if "val/loss" in row
    ]
    assert (tmp_path / "lightning" / "digits" / "version_0" / "hparams.yaml").exists()
