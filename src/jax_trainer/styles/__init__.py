"""Other ways to write a training: `fit`, `train_fn` and `TrainLoop`. Each is a translation, none has a loop."""

from jax_trainer.styles.checkpoint_files import (
    CheckpointFileReader,
    CheckpointFileWriter,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
)
from jax_trainer.styles.checkpointer import get_default_checkpointer
from jax_trainer.styles.checkpoints import Checkpoint, Summary
from jax_trainer.styles.ema import get_ema_hook
from jax_trainer.styles.eval_loop import EvalLoop, EvalTask
from jax_trainer.styles.fit import fit
from jax_trainer.styles.fit_result import FitResult
from jax_trainer.styles.functional import train_fn
from jax_trainer.styles.hooks import every_n_steps
from jax_trainer.styles.loops import TrainLoop, TrainTask
from jax_trainer.styles.schedule import lr_schedule
from jax_trainer.styles.serial import serial
from jax_trainer.styles.summaries import SummaryLogger, SummaryWriter

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
