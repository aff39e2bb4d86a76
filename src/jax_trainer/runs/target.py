"""The folder of a run, and the checkpoint that it resumes from."""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from jax_trainer.callbacks.spikes import FILE as SPIKES
from jax_trainer.checkpoint.errors import damage
from jax_trainer.checkpoint.folder import METRICS, RunFolder
from jax_trainer.checkpoint.ranking import newest_first
from jax_trainer.checkpoint.record import checkpoint_infos
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint, Which
from jax_trainer.core import TrainState
from jax_trainer.datasets import DataSource, Position
from jax_trainer.engine import LoopState
from jax_trainer.engine.processes import peers
from jax_trainer.logger import Logger, RecordMark
from jax_trainer.runs.history import HISTORY

LOG = logging.getLogger("jax_trainer")
COPIED_FILES = (METRICS, HISTORY, SPIKES)  # files that a fork continues
_STEP_PREFIX = "step_"


class RunTarget(NamedTuple):
    """The folder of a run, and the run that it resumes, in the same folder or (fork) in another one."""

    folder: RunFolder
    resumes: RunFolder | None = None
    step: int | None = None  # of the checkpoint to resume from; None: the latest
    changes: tuple[tuple[str, str], ...] = ()  # what differs from the run that it resumes: part and text
    writes: bool = True  # whether this process writes files and logs; of several, only the primary one does

    def locked(self) -> AbstractContextManager[None]:
        """Locks the folder against other jobs, if this process writes to it."""
        return self.folder.locked() if self.writes else nullcontext()

    def write_text(self, name: str, text: str) -> None:
        """Writes `text` to a file of the folder, if this process writes."""
        if self.writes:
            self.folder.write_text(name, text)

    @property
    def is_fork(self) -> bool:
        """Whether it resumes into a new folder; the original run is not modified."""
        return self.resumes is not None and self.resumes.path != self.folder.path


def broadcast_from_primary(find: Callable[[], RunTarget]) -> RunTarget:
    """The result of `find`, which may create a folder: the primary process calls it and broadcasts the result."""
    job = peers()

    def encoded() -> list[Any]:
        target = find()
        resumes = None if target.resumes is None else str(target.resumes.path)
        return [str(target.folder.path), resumes, target.step, target.changes]

    folder, resumes, step, changes = job.broadcast_from_primary("the folder of the run", encoded)
    source = None if resumes is None else RunFolder(Path(resumes))
    differences = tuple((part, text) for part, text in changes)
    return RunTarget(RunFolder(Path(folder)), source, step, differences, writes=job.index == 0)


def run_and_step(path: Path) -> tuple[RunFolder, int | None]:
    """The run of `path`, which is its folder or one of its checkpoints, and the step of that checkpoint."""
    name = path.name.removeprefix(_STEP_PREFIX)
    is_checkpoint = path.name.startswith(_STEP_PREFIX) and name.isdigit()
    if is_checkpoint and path.absolute().parent.name == RunFolder(path).checkpoints.name:
        return RunFolder.open(path.absolute().parent.parent), int(name)
    return RunFolder.open(path), None


def loop_state_of(saved: SavedCheckpoint) -> Position | LoopState:
    """The position or loop state of a checkpoint; a `CheckpointError` if the record is invalid."""
    if not saved.run:  # saved manually, by a custom loop
        return saved.position
    with damage(saved.path, "the state of the loop"):
        return LoopState.from_data(saved.position, saved.run["loop"])


def check_data_state(saved: SavedCheckpoint, train: Any) -> None:
    """Raises a `CheckpointError` if `saved` has a data state that the training data `train` cannot restore."""
    with damage(saved.path, "the state of the data"):
        DataSource(train, "train").check_state(saved.position.state)


def restore_run(
    target: RunTarget,
    store: CheckpointStore,
    like: TrainState,
    *,
    saves: bool,
    logger: Logger,
    load_states: Callable[[SavedCheckpoint], object],
) -> tuple[TrainState, SavedCheckpoint] | None:
    """Restores the state to resume from, and truncates `metrics.jsonl` to it; None: train from the first step.

    A checkpoint with an invalid record counts as damaged: the previous one is used.

    Args:
        target: the run folder, and the run to resume.
        store: the checkpoint store of the run folder.
        like: a state of this run.
        saves: whether this run saves checkpoints.
        logger: the logger of the run folder.
        load_states: restores the states of callbacks and loggers; a `CheckpointError` if that fails.
    """
    if target.resumes is None:
        return None
    source = CheckpointStore(target.resumes.checkpoints) if target.is_fork else store
    if target.is_fork and target.writes:
        for name in COPIED_FILES:
            if (target.resumes.path / name).is_file():
                shutil.copyfile(target.resumes.path / name, target.folder.path / name)
    if target.step is None and not source.infos():
        if not saves:
            raise CheckpointError(
                f"{target.resumes.path} has no checkpoint, and this run saves none: add the callback ModelCheckpoint, "
                "or train without `resume`."
            )
        LOG.warning(f"{target.resumes.path} has no checkpoint: training starts from step 0.")
        logger.cut(RecordMark(0))
        return None
    which = "latest" if target.step is None else target.step
    partial = ("opt_state",) if "optimizer" in [part for part, _ in target.changes] else ()
    state, saved = resumable(source, which, like, load_states, partial)
    if not target.is_fork:
        store.mark_resumed_from(saved)
    rewind_logger(logger, saved)
    LOG.info(f"Resuming from step {saved.step} of {target.resumes.path}.")
    _warn_of_other_devices(saved.run.get("devices"), len(state.step.sharding.device_set))
    return state, saved


def rewind_logger(logger: Logger, saved: SavedCheckpoint) -> None:
    """Drops what was logged after a checkpoint."""
    size, at = saved.run.get("record"), loop_state_of(saved)
    mark = None if size is None else RecordMark(size, tuple(saved.run.get("unwritten", ())))
    logger.cut(mark, saved.step, at.seconds if isinstance(at, LoopState) else 0.0)


def resumable(
    store: CheckpointStore,
    which: Which,
    like: TrainState,
    load_states: Callable[[SavedCheckpoint], object],
    partial: tuple[str, ...] = (),
) -> tuple[TrainState, SavedCheckpoint]:
    """Restores a checkpoint, see `CheckpointStore.restore`; returns its state and record, after `load_states`."""
    check = lambda saved: (loop_state_of(saved), load_states(saved))
    state, saved = store.restore(which, like=like, partial=partial, check=check)
    load_states(saved)  # only the primary process has called it in `check`
    return state, saved


def _warn_of_other_devices(before: Any, now: int) -> None:
    if before not in (None, now):
        LOG.warning(
            f"This run was saved on {before} device{'s' if before != 1 else ''} and resumes on {now}: the order of "
            "floating-point sums differs, so results agree closely but are not bit-identical."
        )


def resumable_step(folder: RunFolder) -> int | None:
    """The step of the latest checkpoint that can be resumed, ignoring damaged ones; None if there is none."""
    # without the other processes, which may have ended
    intact = [one for one in checkpoint_infos(folder.checkpoints) if not one.problem]
    return next((one.step for one in newest_first(intact, ("opt_state",))), None)
