"""A run with logging tools; the same command starts or resumes it. Where it is killed is in the environment.

`python killed_job.py FOLDER TOOLS X_AXIS`: four epochs of four steps, with checkpoints after steps 3, 6, 9, … and
evaluations after every epoch. TOOLS is a list of names, separated by commas; X_AXIS is JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from jax_trainer.callbacks import Callback, ModelCheckpointConfig
from jax_trainer.engine import StepEnd
from jax_trainer.logger import (
    CSVConfig,
    LoggerConfig,
    MLflowConfig,
    TensorboardConfig,
    WandBConfig,
)
from tests.trainer.trainer_runs import plain_for, train_plain  # type: ignore[import-not-found] - of tests/trainer

TOOLS: dict[str, Any] = {
    "tensorboard": TensorboardConfig(),
    "wandb": WandBConfig(mode="offline"),
    "csv": CSVConfig(),
    "mlflow": MLflowConfig(),
}


class LogsEveryStep(Callback):
    """Logs a number at every step, before the metrics of the step have arrived; checkpoints are written meanwhile."""

    def on_step_end(self, event: StepEnd) -> None:
        self.run.logger.log_scalar("mine/steps", event.step, event.step)
        time.sleep(0.1)


def main(folder: Path, tools: list[str], x_axis: Any) -> None:
    """Starts or resumes the run."""
    trainer = plain_for(
        "linen",
        folder,
        train_epochs=4,
        logger=LoggerConfig(2, str(folder), tool_config=[TOOLS[name] for name in tools], x_axis=x_axis),
        callbacks={"saver": ModelCheckpointConfig(every_n_steps=3)},
        given=[LogsEveryStep()],
    )
    train_plain(trainer, resume="auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3]))
