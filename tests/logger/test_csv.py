import csv
import math
from pathlib import Path

import pytest

from jax_trainer.config import ConfigError, config_from
from jax_trainer.logger import CSVConfig, CSVToolLogger, LoggerConfig
from tests.logger.logger_runs import log_everything, logger_with, train_two_epochs
from tests.rows import noted_row


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as opened:
        return [*csv.DictReader(opened)]


def test_a_run_is_a_table_with_a_column_per_metric(tmp_path):
    logger = logger_with(tmp_path, CSVConfig())
    train_two_epochs(logger)
    logger.close("completed")
    rows = table(tmp_path)
    assert [row["step"] for row in rows if row["train/loss_step"]] == ["2", "4", "6", "8"]
    assert [(row["step"], row["epoch"]) for row in rows if row["val/loss"]] == [("4", "1"), ("8", "2")]
    assert all(float(row["val/loss"]) > 0 for row in rows if row["val/loss"])


def test_a_metric_that_appears_later_adds_a_column_and_changes_no_row(tmp_path):
    tool = CSVToolLogger(CSVConfig(), tmp_path)
    tool.write(1, {"a,b": 0.1, "bad": math.nan})
    before = table(tmp_path)
    tool.write(2, {"later": -math.inf})
    assert table(tmp_path) == [
        {**before[0], "later": ""},
        {"step": "2", "a,b": "", "bad": "", "later": "-inf"},
    ]
    assert before == [{"step": "1", "a,b": "0.1", "bad": "nan"}]


def test_numbers_keep_all_their_digits(tmp_path):
    tool = CSVToolLogger(CSVConfig(), tmp_path)
    tool.write(1, {"third": 1 / 3})
    assert float(table(tmp_path)[0]["third"]) == 1 / 3


def test_an_existing_table_is_continued(tmp_path):
    for step in (1, 2):
        CSVToolLogger(CSVConfig(), tmp_path).write(step, {"loss": 0.5})
    assert [row["step"] for row in table(tmp_path)] == ["1", "2"]


def test_a_run_that_starts_again_has_no_rows(tmp_path):
    tool = CSVToolLogger(CSVConfig(), tmp_path)
    tool.write(1, {"loss": 0.5})
    assert tool.resume_at(0) == 0
    assert not (tmp_path / "metrics.csv").exists()


def test_hyperparameters_are_a_table_of_their_own(tmp_path):
    logger = logger_with(tmp_path, CSVConfig())
    log_everything(logger)
    logger.close("completed")
    lines = (tmp_path / "hparams.csv").read_text().splitlines()
    assert lines[:2] == ["name,value", "optimizer.lr,0.1"] and lines[-1] == "test/acc,0.75"


def test_names_of_other_libraries_are_understood():
    for name, ours in [
        ("CSVLogger", "CSVToolLogger"),
        ("MLFlowLogger", "MLflowToolLogger"),
        ("TensorBoardLogger", "TensorboardToolLogger"),
        ("WandbLogger", "WandBToolLogger"),
    ]:
        with noted_row(name, ours), pytest.raises(ConfigError, match=f"{name}.*`{ours}`"):
            config_from({"tool_config": {"class_name": name}}, LoggerConfig)
