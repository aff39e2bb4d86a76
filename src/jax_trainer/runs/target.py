"""The folder of a run, and what a run goes on from."""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from jax_trainer.callbacks.spike_file import FILE as SPIKES
from jax_trainer.checkpoint.folder import METRICS, RunFolder
from jax_trainer.checkpoint.record import damage
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint, Which
from jax_trainer.core import TrainState
from jax_trainer.datasets import DataSource, Position
from jax_trainer.engine import LoopState
from jax_trainer.logger import Logger, RecordMark
from jax_trainer.processes import process_group

LOG = logging.getLogger("jax_trainer")
TAKEN_ALONG = (METRICS, SPIKES)  # files that a run adds to
_OF_A_CHECKPOINT = "step_"


class RunTarget(NamedTuple):
    """The folder of a training, and the run that it goes on with, if it does: in the same folder, or in another one."""

    folder: RunFolder
    resumes: RunFolder | None = None
    step: int | None = None  # of the checkpoint that was asked for; None: the latest

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other jobs from writing to the folder: of several processes, the lead does."""
        return self.folder.locked() if process_group().is_primary else nullcontext()

    def write_text(self, name: str, text: str) -> None:
        """Puts `text` into a file of the folder: of several processes, the lead does."""
        if process_group().is_primary:
            self.folder.write_text(name, text)

    @property
    def is_fork(self) -> bool:
        """Whether the run that is gone on with stays as it is."""
        return self.resumes is not None and self.resumes.path != self.folder.path


def broadcast_from_primary(find: Callable[[], RunTarget]) -> RunTarget:
    """What `find` gives, which may make a folder: of several processes the lead asks, and tells the others."""
    if not process_group().is_multi_process:
        return find()

    def told() -> str:
        place = find()
        goes_on = None if place.resumes is None else str(place.resumes.path)
        return json.dumps([str(place.folder.path), goes_on, place.step])

    folder, goes_on, step = json.loads(process_group().broadcast("the folder of the run", told))
    return RunTarget(RunFolder(Path(folder)), None if goes_on is None else RunFolder(Path(goes_on)), step)


def run_and_step(path: Path) -> tuple[RunFolder, int | None]:
    """The run that `path` means: its folder, or one of its checkpoints, of which this is the step."""
    name = path.name.removeprefix(_OF_A_CHECKPOINT)
    is_checkpoint = path.name.startswith(_OF_A_CHECKPOINT) and name.isdigit()
    if is_checkpoint and path.absolute().parent.name == RunFolder(path).checkpoints.name:
        return RunFolder.open(path.absolute().parent.parent), int(name)
    return RunFolder.open(path), None


def loop_state_of(saved: SavedCheckpoint) -> Position | LoopState:
    """Where a run stood when it saved; a `CheckpointError` where the record does not say."""
    if not saved.run:  # saved by hand, in a loop of one's own
        return saved.position
    with damage(saved.path, "the state of the loop"):
        return LoopState.from_data(saved.position, saved.run["loop"])


def check_data_state(saved: SavedCheckpoint, train: Any) -> None:
    """Raises a `CheckpointError` if `saved` holds a state of the data and the training data `train` keeps none."""
    with damage(saved.path, "the state of the data"):
        DataSource(train, "train").check_state(saved.position.state)


def restore_run(
    place: RunTarget,
    store: CheckpointStore,
    like: TrainState,
    *,
    saves: bool,
    logger: Logger,
    remember: Callable[[SavedCheckpoint], object],
) -> tuple[TrainState, SavedCheckpoint] | None:
    """The state to resume from, with the run's record cut to what was known then; None begins with the first step.

    A checkpoint whose record cannot be used counts as damaged: the one before it is taken.

    Args:
        place: what is gone on with.
        store: of the folder in which the training writes.
        like: a state of this training.
        saves: whether this training saves anything.
        logger: of the folder in which the training writes.
        remember: loads the states of callbacks and others; a `CheckpointError` where they cannot be.
    """
    if place.resumes is None:
        return None
    source = CheckpointStore(place.resumes.checkpoints) if place.is_fork else store
    if place.is_fork and process_group().is_primary:
        _take_along(place.resumes.path, place.folder.path)
    if place.step is None and not source.infos():
        if not saves:
            raise CheckpointError(
                f"{place.resumes.path} has no checkpoint, and nothing saves any: add the callback ModelCheckpoint, or "
                "train without `resume`."
            )
        LOG.warning(f"{place.resumes.path} has no checkpoint: the run had saved nothing, and begins again.")
        logger.cut(RecordMark(0))
        return None
    which = "latest" if place.step is None else place.step
    state, saved = resumable(source, which, like, remember)
    if not place.is_fork:
        store.mark_resumed_from(saved)
    logger.cut(record_mark(saved))
    LOG.info(f"Going on from step {saved.step} of {place.resumes.path}.")
    _tell_of_other_devices(saved.run.get("devices"), len(state.step.sharding.device_set))
    return state, saved


def record_mark(saved: SavedCheckpoint) -> RecordMark | None:
    """Where the run's rows stood when it saved; None where that is not known."""
    size = saved.run.get("record")
    return None if size is None else RecordMark(size, tuple(saved.run.get("unwritten", ())))


def resumable(
    store: CheckpointStore, which: Which, like: TrainState, remember: Callable[[SavedCheckpoint], object]
) -> tuple[TrainState, SavedCheckpoint]:
    """The state of a checkpoint and its record, which everybody has loaded by `remember`."""
    state, saved = store.restore(which, like=like, check=lambda saved: (loop_state_of(saved), remember(saved)))
    remember(saved)  # of several processes only one has checked
    return state, saved


def _tell_of_other_devices(before: Any, now: int) -> None:
    if before not in (None, now):
        LOG.warning(
            f"This run was saved on {before} device{'s' if before != 1 else ''} and goes on on {now}: sums are added "
            "in another order, so what comes out agrees closely, and not bit for bit."
        )


def _take_along(old: Path, new: Path) -> None:
    for name in TAKEN_ALONG:
        if (old / name).is_file():
            shutil.copyfile(old / name, new / name)
