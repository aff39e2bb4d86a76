"""What a run trains, and what it writes: the arguments of a style, translated."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_trainer.callbacks import Callback, ModelCheckpointConfig, RunContext
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.mirror import Mirror, address_of
from jax_trainer.checkpoint.ranking import Direction
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import CompiledProgram, TrainState
from jax_trainer.datasets import Data, DatasetModule, Position
from jax_trainer.engine import LoopState, Observer, Plan
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.runs.best import BestInMemory, Ranking
from jax_trainer.runs.fingerprint import Fingerprint
from jax_trainer.runs.options import Guard

Restored = tuple[TrainState, Position | LoopState]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a run writes to its folder.

    Args:
        logger: opens the logger of a run folder.
        callbacks: creates the callbacks of the run, by name, or attaches those of the user.
        files: texts by file name, such as the configuration.
        hparams: the hyperparameters that a completed run logs with its final metrics.
        saver: the configuration of the checkpoint callback; None: the run saves none, and keeps the best in memory.
        mirror: creates the mirror of a run folder, or returns None.
        ranking: compares weights; None: by the metric that `saver` monitors.
        is_ranked: whether the run reports what ranks its checkpoints.
        dataset, trainer, transforms, monitors: what callbacks see of the run, see `RunContext`.
        resume_call: the call that resumes the run, with "{}" for its folder.
    """

    logger: Callable[[RunFolder], Logger]
    callbacks: Callable[[RunContext], Mapping[str, Callback]]
    files: Mapping[str, str]
    hparams: Mapping[str, Any]
    saver: ModelCheckpointConfig | None
    mirror: Callable[[RunFolder], Mirror | None] = lambda folder: None
    ranking: Ranking | None = None
    is_ranked: bool = True
    dataset: DatasetModule | None = None
    trainer: Any = None
    transforms: str = ""
    monitors: bool = True
    resume_call: str = ""

    def store(self, folder: RunFolder) -> CheckpointStore:
        """The checkpoints of the run."""
        better = None if self.ranking is None or not self.ranking.is_custom else self.ranking.is_better
        return store_in(folder, self.saver, better, is_ranked=self.is_ranked)

    def in_memory(self, *, validates: bool, leaves_out: Callable[[Collection[str]], bool]) -> BestInMemory | None:
        """Keeps the best weights of a run without checkpoints; None if nothing ranks them. See `BestInMemory`."""
        if self.saver is not None or self.ranking is None or not self.is_ranked:
            return None
        return BestInMemory(self.ranking, validates=validates, leaves_out=leaves_out)

    @property
    def ranked_by(self) -> tuple[str, Direction] | None:
        """The metric that ranks checkpoints, and "min" or "max"; None: a user's function does."""
        is_custom = self.ranking is not None and self.ranking.is_custom
        return None if self.saver is None or is_custom else (self.saver.monitor, self.saver.best_mode)


def store_in(
    folder: RunFolder, saver: ModelCheckpointConfig | None, better: Callable[..., bool] | None, *, is_ranked: bool
) -> CheckpointStore:
    """The checkpoints of a run folder, ranked by the metric that `saver` monitors, or by `better`."""
    options = {} if saver is None else saver.store_options(validates=is_ranked, monitors=better is None)
    return CheckpointStore(folder.checkpoints, **options, better=better if is_ranked else None)


def mirror_of(folder: RunFolder, config: LoggerConfig, name: str) -> Mirror | None:
    """The mirror of the folder of a run with this name, where the configuration says; None: nowhere."""
    if not config.mirror:
        return None
    return Mirror(folder, address_of(config.mirror, name, folder.path.name), timeout=config.mirror_timeout)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What to train, for how long, and what to write.

    Args:
        program: the compiled program.
        plan: the length of the run, and when it evaluates.
        data: the training data and the validation sets.
        init: returns the initial state; not called before the folder is locked.
        restore: returns the state to resume from and its position, given the initial state; None: a new run. By
            default, the checkpoint of the run's target.
        tests: test sets by name, evaluated with the best weights after training.
        test_batches: maximum number of batches of each test set.
        observers: returns the observers of the style, given the `Run`; they are notified before the callbacks.
        options: what happens to values that are not finite.
        progress: show a progress bar.
        progress_metric: the metric that it shows besides the loss; "": the one that a callback monitors.
        in_steps: count in steps, not in epochs, in the progress bar.
        train_epoch: trains the epoch with this number by calling `Run.train_epoch`; None: the run does.
        on_open: called with the `Run` when its logger, callbacks and state are there, before the first event.
        recording: what the run writes to its folder; None: it has none.
        fingerprint: what the run computes, by which it is found; None: it cannot be found.
    """

    program: CompiledProgram
    plan: Plan
    data: Data
    init: Callable[[], TrainState]
    restore: Callable[[TrainState], Restored | None] | None = None
    tests: Mapping[str, Any] = field(default_factory=dict)
    test_batches: int | None = None
    observers: Callable[[Any], Sequence[Observer]] = lambda run: ()
    options: Guard = field(default_factory=Guard)
    progress: bool = True
    progress_metric: str = ""
    in_steps: bool = False
    train_epoch: Callable[[int], object] | None = None
    on_open: Callable[[Any], object] = lambda run: None
    recording: Recording | None = None
    fingerprint: Fingerprint | None = None
