"""The other APIs besides `TrainerModule`: `fit`, `train_fn` and `TrainLoop`. Each is translated to a `RunSpec`."""

from jax_trainer.styles.checkpointer import get_default_checkpointer
from jax_trainer.styles.checkpoints import (
    Checkpoint,
    CheckpointFileReader,
    CheckpointFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
    Summary,
    SummaryLogger,
    SummaryWriter,
    serial,
)
from jax_trainer.styles.fit_result import FitResult
from jax_trainer.styles.fitting import fit
from jax_trainer.styles.functional import train_fn
from jax_trainer.styles.hooks import every_n_steps, get_ema_hook
from jax_trainer.styles.learning_rate import lr_find, lr_schedule
from jax_trainer.styles.loop_tasks import EvalTask, TrainTask
from jax_trainer.styles.looping import EvalLoop, TrainLoop

__all__ = [
    "Checkpoint",
    "CheckpointFileReader",
    "CheckpointFileWriter",
    "EvalLoop",
    "EvalTask",
    "FitResult",
    "HighestCheckpointFileReader",
    "HighestCheckpointFileWriter",
    "LowestCheckpointFileReader",
    "LowestCheckpointFileWriter",
    "Summary",
    "SummaryLogger",
    "SummaryWriter",
    "TrainLoop",
    "TrainTask",
    "every_n_steps",
    "fit",
    "get_default_checkpointer",
    "get_ema_hook",
    "lr_find",
    "lr_schedule",
    "serial",
    "train_fn",
]
