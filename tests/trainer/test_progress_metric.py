from pathlib import Path
from typing import Any

import pytest

from jax_trainer.callbacks import EarlyStoppingConfig, ModelCheckpointConfig, ProgressBar
from tests.trainer.trainer_runs import digits, trainer_for

STOPPING, SAVER = EarlyStoppingConfig(monitor="val/loss"), ModelCheckpointConfig(monitor="val/acc")


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"callbacks": {"stopping": STOPPING, "saver": SAVER}}, "val/acc"),
        ({"callbacks": {"stopping": STOPPING}}, "val/loss"),
        ({"callbacks": {}}, ""),
        ({"callbacks": {"saver": SAVER}, "progress_metric": "train/acc"}, "train/acc"),
    ],
)
def test_the_bar_shows_what_is_monitored_or_chosen(changes: Any, metric: str, tmp_path: Path, monkeypatch):
    metrics = []

    class Bar(ProgressBar):
        """Notes the metric that it gets."""

        def __init__(self, **options: Any) -> None:
            metrics.append(options["metric"])
            super().__init__(**options)

    monkeypatch.setattr("jax_trainer.runs.run.ProgressBar", Bar)
    trainer = trainer_for("nnx", tmp_path, enable_progress_bar=True, fast_dev_run=1, **changes)
    trainer.train_model(digits().train_loader, digits().val_loader)
    assert metrics == [metric]
