"""Mistakes when loading and resuming, with permissions and with the disk."""

import os
from pathlib import Path
from typing import Any

import optax
import pytest
from flax import linen as nn

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import (
    CheckpointFileReader,
    CheckpointFileWriter,
    TrainLoop,
    TrainTask,
    get_default_checkpointer,
)
from tests.first_hour.mistakes import (
    LATE,
    Net,
    Table,
    Trainer,
    cross_entropy,
    loader,
    make_trainer,
    run_fit,
    run_loop,
    run_train_fn,
    run_trainer,
)

RESUMING = Table()


class Wide(nn.Module):
    """Another model."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(3)(nn.Dense(7)(x))


def run_of(folder: Path) -> Path:
    """The folder of a small finished run."""
    return Path(run_fit(folder).folder)


@RESUMING.row(
    "resuming from nothing: fit, resume from a folder that is not there",
    "nowhere",
    error=(ValueError, FileNotFoundError),
)
def _(folder: Path) -> None:
    run_fit(folder, resume=folder / "nowhere")


@RESUMING.row(
    "resuming from nothing: fit, resume=True without a run", "runs|fit", "resume", error=(ValueError, FileNotFoundError)
)
def _(folder: Path) -> None:
    run_fit(folder, resume=True)


@RESUMING.row("resuming from nothing: fit, resume from a file", "notes.txt", error=Exception)
def _(folder: Path) -> None:
    (folder / "notes.txt").write_text("hello")
    run_fit(folder, resume=folder / "notes.txt")


@RESUMING.row("resuming from nothing: fit, resume from a folder that is no run", "other", error=Exception)
def _(folder: Path) -> None:
    (folder / "other").mkdir()
    run_fit(folder, resume=folder / "other")


@RESUMING.row("resuming something else: fit, resume with another model", "model: Net → Wide", "allow_changes", at=LATE)
def _(folder: Path) -> None:
    run_fit(folder, Wide(), resume=run_of(folder), num_epochs=2)


@RESUMING.row(
    "resuming something else: fit, resume with another optimizer",
    r"optimizer\.(name|learning_rate): .* → ",
    "allow_changes",
    at=LATE,
)
def _(folder: Path) -> None:
    run_fit(folder, resume=run_of(folder), num_epochs=2, optimizer=optax.adam(1e-3))


@RESUMING.row(
    "a log_dir that cannot be used: fit, log_dir is a file", "elsewhere", "file|folder|directory", error=OSError
)
def _(folder: Path) -> None:
    (folder / "elsewhere").write_text("")
    run_fit(folder, log_dir=folder / "elsewhere" / "runs")


def _no_writing(folder: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    shut = folder / "shut"
    shut.mkdir(mode=0o500)
    return shut


@RESUMING.row(
    "a log_dir that cannot be used: fit, log_dir may not be written to", "shut", "allowed", error=CheckpointError
)
def _(folder: Path) -> None:
    run_fit(folder, log_dir=_no_writing(folder))


@RESUMING.row(
    "a log_dir that cannot be used: fit, log_dir on a read-only disk", "/proc", "writable path", error=OSError
)
def _(folder: Path) -> None:
    run_fit(folder, log_dir="/proc/runs")


@RESUMING.row(
    "a log_dir that cannot be used: TrainerModule, log_dir on a read-only disk", "/proc", "writable path", error=OSError
)
def _(folder: Path) -> None:
    run_trainer(folder, logger=LoggerConfig(log_dir="/proc/runs"))


@RESUMING.row("resuming from nothing: TrainerModule, resume=True without a folder", "resume", error=Exception)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), resume=True)


@RESUMING.row(
    "resuming from nothing: TrainerModule, resume from a folder that is not there", "nowhere", error=Exception
)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), resume=folder / "nowhere")


@RESUMING.row(
    "loading what is not there: TrainerModule, load_model without a run", "checkpoint|folder|run", error=Exception
)
def _(folder: Path) -> None:
    make_trainer(folder).load_model()


@RESUMING.row(
    "loading what is not there: TrainerModule, load_model of a step that is not there", "77", error=Exception, at=LATE
)
def _(folder: Path) -> None:
    run_trainer(folder).load_model(77)


@RESUMING.row(
    "loading what is not there: TrainerModule, load_from_checkpoint of a folder that is not there",
    "nowhere",
    error=Exception,
)
def _(folder: Path) -> None:
    Trainer.load_from_checkpoint(folder / "nowhere")


@RESUMING.row(
    "loading what is not there: TrainerModule, load_weights of a file that is not there", "nowhere", error=Exception
)
def _(folder: Path) -> None:
    make_trainer(folder).load_weights(folder / "nowhere")


@RESUMING.row(
    "loading another model: TrainerModule, load_weights of another model",
    "kernel|Dense|param",
    error=Exception,
    at=LATE,
)
def _(folder: Path) -> None:
    run = run_trainer(folder, callbacks=[ModelCheckpointConfig(every_n_steps=1)]).folder.path
    make_trainer(folder, model=Wide()).load_weights(run)


@RESUMING.row("loading another model: TrainLoop, a checkpoint file of another model", "kernel|Dense|fit|param", at=LATE)
def _(folder: Path) -> None:
    task = TrainTask(apply=Net().apply, optimizer=optax.sgd(0.1, momentum=0.9), loss=cross_entropy, data=loader())
    write = CheckpointFileWriter(output_dir=str(folder / "loop"))
    for checkpoint in TrainLoop(init=Net().init, task=task, n_steps=1, stdout=False):
        write(checkpoint)
    run_loop(Wide(), init=CheckpointFileReader(dir=str(folder / "loop"), target=Wide().init))


@RESUMING.row(
    "a checkpointer that cannot save: train_fn, a checkpointer in a folder that cannot be",
    "/proc/checkpoints",
    error=CheckpointError,
)
def _(folder: Path) -> None:
    save, _, _ = get_default_checkpointer("/proc/checkpoints", save_every_n_steps=1)
    run_train_fn(hooks=[save])


@RESUMING.row(
    "a checkpointer that cannot save: train_fn, a checkpointer that saves every 0 steps",
    "save_every_n_steps",
    "0",
    error=ValueError,
)
def _(folder: Path) -> None:
    get_default_checkpointer(str(folder), save_every_n_steps=0)
