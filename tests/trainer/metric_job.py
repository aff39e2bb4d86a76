"""A run with metrics that are computed from statistics; the same command starts or resumes it.

`python metric_job.py FOLDER EVERY`: saves every EVERY steps, and writes `FOLDER/result.json` at the end. Where it is
killed is in the environment.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.callbacks import LambdaCallback, ModelCheckpointConfig
from jax_trainer.datasets import ArrayLoader, SupervisedBatch
from jax_trainer.engine import StepEnd
from jax_trainer.metrics import AUROC, F1, ConfusionMatrix, Perplexity
from jax_trainer.testing import digest
from jax_trainer.trainer import ImgClassifierTrainer
from tests.trainer.trainer_runs import SGD, LinearLinenConfig, rows, settings

CLASSES, STEPS = 4, 5
METRICS = {
    "f1": F1.config_class(average="weighted"),
    "auroc": AUROC.config_class(log_mode="any", log_freq="any"),
    "matrix": ConfusionMatrix.config_class(log_mode="val"),
    "perplexity": Perplexity.config_class(log_mode="train"),
}


def examples() -> SupervisedBatch:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(44, 3)).astype(np.float32)  # five batches of 8, and a ragged one
    return SupervisedBatch.of(inputs, (inputs.argmax(-1) + rng.integers(0, 2, 44)).astype(np.int32))


def trainer_in(folder: Path, **changes: Any) -> ImgClassifierTrainer:
    options = {"num_classes": CLASSES, "class_weights": {0: 2.0, 3: 0.5}, "metrics": METRICS, "train_epochs": 3}
    return ImgClassifierTrainer(
        model_config=LinearLinenConfig(num_classes=CLASSES),
        optimizer_config=SGD,
        exmp_input=examples()[:8],
        **settings(folder, **{**options, **changes}),
    )


def train(trainer: ImgClassifierTrainer, **options: Any) -> Any:
    return trainer.train_model(
        ArrayLoader(examples(), 8, shuffle=True, drop_last=True), ArrayLoader(examples(), 8), **options
    )


def main(folder: Path, every: int) -> None:
    def wait(event: StepEnd) -> None:
        """Until the latest checkpoint is on disk, so that a kill leaves exactly this one."""
        due = (event.step - 1) // every * every
        # not `rglob`, which fails if a folder is deleted meanwhile
        is_there = lambda: any(
            path.endswith(f"step_{due:08}") and "MANIFEST.json" in files for path, _, files in os.walk(folder)
        )
        while due and not is_there():
            time.sleep(0.01)

    saver = ModelCheckpointConfig(every_n_epochs=0, every_n_steps=every)
    trainer = trainer_in(folder, callbacks={"saver": saver})
    trainer._given_callbacks["wait"] = LambdaCallback(on_step_end=wait)
    train(trainer, resume="auto")
    result = {"state": digest(trainer.state), "rows": rows(trainer)}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
