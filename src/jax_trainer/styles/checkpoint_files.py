"""Writers and readers of checkpoint files of a loop.

In their folder, checkpoints are in `regular`, and the best by a metric in `lowest_<group>_<metric>` or
`highest_<group>_<metric>`; each of these is the folder of a `CheckpointStore`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from jax_trainer.checkpoint import safe_join
from jax_trainer.checkpoint.ranking import is_better
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.output import OUT
from jax_trainer.engine import LoopState, driving
from jax_trainer.runs import loop_state_of
from jax_trainer.styles.checkpoints import AnyCheckpoint, Checkpoint, Summary, by_full_name, state_of

LOG = logging.getLogger("jax_trainer")
REGULAR = "regular"
Extreme = Literal["lowest", "highest"]


class CheckpointFileWriter:
    """Saves every checkpoint or summary that it is called with, and returns it once it is on disk.

    Args:
        output_dir: the folder.
        keep: number of latest checkpoints to keep.
        overwrite: replace checkpoints of the same and of later steps that another run has left there; False: refuse
            them with an error.
    """

    def __init__(self, output_dir: str | Path, *, keep: int = 1, overwrite: bool = True) -> None:
        self._store = CheckpointStore(Path(output_dir) / REGULAR, keep_latest=keep, keep_best=0)
        self._overwrite = overwrite

    def __call__(self, checkpoint: AnyCheckpoint) -> AnyCheckpoint:
        """Saves `checkpoint`."""
        _save(self._store, checkpoint, by_full_name(checkpoint), overwrite=self._overwrite)
        return checkpoint


class _BestCheckpointFileWriter:
    """Saves the checkpoints whose metric is better than all before, including those already on disk."""

    word: ClassVar[Extreme]

    def __init__(
        self,
        output_dir: str | Path,
        metric: str,
        group: str = "eval",
        *,
        keep: int = 1,
        overwrite: bool = True,
        stdout: bool = True,
    ) -> None:
        self._name, self._overwrite, self._has_warned = f"{group}/{metric}", overwrite, False
        self._store = _best_store(output_dir, self.word, group, metric, keep)
        found = self._store.best()
        self.best = None if found is None else found.metrics[self._name]
        if stdout and self.best is not None:
            OUT.write(f"The {self.word} value for the metric {self._name} is set to {self.best:.8f}.\n")

    best: float | None  # the best value so far

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Saves `summary` if its metric is the best so far."""
        metrics = by_full_name(summary)
        if self._name not in metrics:
            self._report_missing(summary, metrics)
            return summary
        value = metrics[self._name]
        if is_better(value, self.best, "min" if self.word == "lowest" else "max"):
            _save(self._store, summary, metrics, overwrite=self._overwrite)
            self.best = value
        return summary

    def _report_missing(self, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
        kind, available = type(self).__name__, f"Its metrics: {', '.join(sorted(metrics))}."
        if isinstance(checkpoint, Summary):
            raise ValueError(f"{kind}: the summary has no metric {self._name!r}. {available}")
        if not self._has_warned:
            LOG.warning(
                f"{kind}: the checkpoint has no metric {self._name!r}, and is not saved. Call an `EvalLoop` that "
                f"measures it first: `writer(eval_loop(checkpoint))`. {available}"
            )
        self._has_warned = True


class LowestCheckpointFileWriter(_BestCheckpointFileWriter):
    """Saves the summaries whose metric is lower than all before; returns every summary.

    Args:
        output_dir: the folder.
        metric: the label of the metric.
        group: the group of the metric.
        keep: number of best checkpoints to keep.
        overwrite: see `CheckpointFileWriter`.
        stdout: print the lowest value so far, if checkpoints are on disk.
    """

    word = "lowest"


class HighestCheckpointFileWriter(_BestCheckpointFileWriter):
    """Saves the summaries whose metric is higher than all before; returns every summary.

    Args:
        output_dir: the folder.
        metric: the label of the metric.
        group: the group of the metric.
        keep: number of best checkpoints to keep.
        overwrite: see `CheckpointFileWriter`.
        stdout: print the highest value so far, if checkpoints are on disk.
    """

    word = "highest"


@dataclass(frozen=True)
class CheckpointFileReader:
    """Lets a loop resume from the latest checkpoint of a `CheckpointFileWriter`: `TrainLoop(init=reader, …)`.

    Args:
        dir: the folder.
        target: the `init` of the model, called if there is no checkpoint yet.
    """

    which: ClassVar[Literal["latest", "best"]] = "latest"

    dir: str | Path
    target: Callable[..., Any]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints that it reads."""
        return self._store().folder

    def read(self, like: TrainState) -> tuple[TrainState, Position | LoopState] | None:
        """The state, with the structure of `like`, and the position in the data; None without a checkpoint."""
        store = self._store()
        if not store.infos():
            return None
        state, saved = store.restore(self.which, like=like, check=loop_state_of)
        return state, loop_state_of(saved)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(Path(self.dir) / REGULAR)


@dataclass(frozen=True)
class _BestCheckpointFileReader(CheckpointFileReader):
    """Lets a loop resume from the best checkpoint."""

    which = "best"
    word: ClassVar[Extreme]

    metric: str
    group: str = "eval"

    def _store(self) -> CheckpointStore:
        return _best_store(self.dir, self.word, self.group, self.metric)


@dataclass(frozen=True)
class LowestCheckpointFileReader(_BestCheckpointFileReader):
    """Lets a loop resume from the best checkpoint of a `LowestCheckpointFileWriter`.

    Args:
        dir: the folder.
        target: the `init` of the model, called if there is no checkpoint yet.
        metric: the label of the metric.
        group: the group of the metric.
    """

    word = "lowest"


@dataclass(frozen=True)
class HighestCheckpointFileReader(_BestCheckpointFileReader):
    """Lets a loop resume from the best checkpoint of a `HighestCheckpointFileWriter`.

    Args:
        dir: the folder.
        target: the `init` of the model, called if there is no checkpoint yet.
        metric: the label of the metric.
        group: the group of the metric.
    """

    word = "highest"


def _best_store(folder: str | Path, word: Extreme, group: str, metric: str, keep: int = 1) -> CheckpointStore:
    path, mode = safe_join(Path(folder).absolute(), f"{word}_{group}_{metric}"), "min" if word == "lowest" else "max"
    return CheckpointStore(path, keep_best=keep, keep_latest=1, monitor=f"{group}/{metric}", mode=mode)


def _save(store: CheckpointStore, checkpoint: Checkpoint, metrics: Mapping[str, float], *, overwrite: bool) -> None:
    loop_state = checkpoint.loop_state or LoopState()
    same_or_later = [step for step in store.steps() if step >= checkpoint.step]
    if same_or_later and not overwrite:
        raise CheckpointError(
            f"{store.folder} already has a checkpoint of step {same_or_later[-1]}, and this one is of step "
            f"{checkpoint.step}. Resume from it with `init=CheckpointFileReader(…)`, use another folder, or replace it "
            "with `overwrite=True`."
        )
    later = [step for step in same_or_later if step > checkpoint.step]
    if later:
        LOG.warning(
            f"{store.folder}: the checkpoint of step {checkpoint.step} replaces another run's step {later[-1]}."
        )
        store.mark_resumed_from(SavedCheckpoint(checkpoint.step, loop_state.position, {}, store.folder / "step"))
    if checkpoint.recorded is not None:
        checkpoint.recorded.write(store.folder)
    state = state_of(checkpoint)
    with driving((), state, loop_state):  # the first Ctrl-C waits for the write, the second does not
        store.save(state, loop_state.position, metrics, run={"loop": loop_state.to_data()})
        if later:
            store.completed()
