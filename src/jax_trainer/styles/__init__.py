"""The other APIs besides `TrainerModule`: `fit`, `train_fn` and `TrainLoop`. All of them run the engine's loop."""

from jax_trainer.styles.fitting.fit import fit
from jax_trainer.styles.fitting.result import FitResult
from jax_trainer.styles.fitting.schedule import lr_schedule
from jax_trainer.styles.functional.checkpointer import get_default_checkpointer
from jax_trainer.styles.functional.ema import get_ema_hook
from jax_trainer.styles.functional.hooks import every_n_steps
from jax_trainer.styles.functional.train_fn import train_fn
from jax_trainer.styles.looping.checkpoint_files import (
    CheckpointFileReader,
    CheckpointFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
)
from jax_trainer.styles.looping.checkpoints import Checkpoint, Summary
from jax_trainer.styles.looping.eval_loop import EvalLoop, EvalTask
from jax_trainer.styles.looping.loops import TrainLoop, TrainTask
from jax_trainer.styles.looping.serial import serial
from jax_trainer.styles.looping.summaries import SummaryLogger, SummaryWriter

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
    "lr_schedule",
    "serial",
    "train_fn",
]
