"""Where a training writes, and what it goes on from."""

import logging
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_trainer.callbacks.spike_file import FILE as SPIKES
from jax_trainer.checkpoint.folder import METRICS, RunFolder
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, Saved
from jax_trainer.config import dump_config
from jax_trainer.core import TrainState
from jax_trainer.logger import run_place
from jax_trainer.logger.rows import cut
from jax_trainer.trainer.stored import configs_of, run_and_step

LOG = logging.getLogger("jax_trainer")
TAKEN_ALONG = (METRICS, SPIKES)  # files that a run adds to
Resume = bool | Literal["auto"] | str | Path


class Place(NamedTuple):
    """The folder of a training, and the run that it goes on with, if it does: in the same folder, or in another one."""

    folder: RunFolder
    goes_on: RunFolder | None = None
    step: int | None = None  # of the checkpoint that was asked for; None: the latest

    @property
    def is_fork(self) -> bool:
        """Whether the run that is gone on with stays as it is."""
        return self.goes_on is not None and self.goes_on.path != self.folder.path


def place_of(trainer: Any, resume: Resume, *, fork: bool) -> Place:
    """Where a training of `trainer` writes; makes the folder of a new run."""
    if fork and not resume:
        raise ValueError("`fork` goes on in a new folder: say with `resume` what to go on from.")
    found, step = _asked_for(trainer, resume)
    if found is None or fork:
        return Place(RunFolder.create(*_where(trainer)), found, step)
    return Place(found, found, step)


def _asked_for(trainer: Any, resume: Resume) -> tuple[RunFolder | None, int | None]:
    if resume == "auto":
        return RunFolder.find(*_where(trainer), config_text=dump_config(configs_of(trainer))), None
    if isinstance(resume, str | Path):
        return run_and_step(Path(resume))
    if resume and trainer.folder is None:
        raise ValueError("There is nothing to resume: pass the run's folder, as in `resume='runs/…'`.")
    return (trainer.folder if resume else None), None


def _where(trainer: Any) -> tuple[Path, str, str | None]:
    return run_place(trainer.config.logger, trainer.model_name)


def restored(place: Place, store: CheckpointStore, like: TrainState, *, saves: bool) -> tuple[TrainState, Saved] | None:
    """The state to go on from, with the run's record cut to what was known then; None begins with the first step.

    Args:
        place: what is gone on with.
        store: of the folder in which the training writes.
        like: a state of this training.
        saves: whether this training saves anything.
    """
    if place.goes_on is None:
        return None
    source = CheckpointStore(place.goes_on.checkpoints) if place.is_fork else store
    if place.is_fork:
        _take_along(place.goes_on.path, place.folder.path)
    if place.step is None and not source.listed():
        if not saves:
            raise CheckpointError(
                f"{place.goes_on.path} has no checkpoint, and nothing saves any: add the callback ModelCheckpoint, or "
                "train without `resume`."
            )
        LOG.warning(f"{place.goes_on.path} has no checkpoint: the run had saved nothing, and begins again.")
        cut(place.folder.metrics_file, 0)
        return None
    state, saved = source.restore("latest" if place.step is None else place.step, like=like)
    if not place.is_fork:
        store.goes_on_from(saved)
    cut(place.folder.metrics_file, saved.run.get("record"))
    LOG.info(f"Going on from step {saved.step} of {place.goes_on.path}.")
    before, now = saved.run.get("devices"), len(state.step.sharding.device_set)
    if before not in (None, now):
        LOG.warning(
            f"This run was saved on {before} device{'s' if before != 1 else ''} and goes on on {now}: sums are added "
            "in another order, so what comes out agrees closely, and not bit for bit."
        )
    return state, saved


def _take_along(old: Path, new: Path) -> None:
    for name in TAKEN_ALONG:
        if (old / name).is_file():
            shutil.copyfile(old / name, new / name)
