"""`Checkpoint` and `Summary`: what a `TrainLoop` yields; what reports them; writers and readers of checkpoint files.

In the folder of files, checkpoints are in `regular`, and the best by a metric in `lowest_<group>_<metric>` or
`highest_<group>_<metric>`; each of these is the folder of a `CheckpointStore`.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import jax.numpy as jnp

from jax_trainer.checkpoint import safe_join
from jax_trainer.checkpoint.ranking import is_better
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint
from jax_trainer.core import PyTree, TrainState
from jax_trainer.core.steps import global_norm
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.output import OUT
from jax_trainer.engine import LoopState, driving
from jax_trainer.logger import TensorboardConfig, TensorboardToolLogger
from jax_trainer.runs import Recorded, loop_state_of

Metrics = Mapping[str, float]
AnyCheckpoint = TypeVar("AnyCheckpoint", bound="Checkpoint")
_GROUP, _LABEL = len("train"), len("seconds_per_step")  # minimum column widths of a report


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of training after a step. Later steps do not change it.

    Args:
        model_params: the trained parameters.
        model_state: the other variables of the model, such as batch statistics.
        optimizer_state: the state of the optax optimizer.
        grads: the gradients of this step.
        loss: the loss of this step.
        n_completed_steps: number of steps since the previous checkpoint.
        elapsed_time: duration of these steps in seconds.
        step: total number of steps.
        rng: key data of the loop's root key.
        extra: further state of the loop.
        loop_state: position in the data, to resume from.
        frozen: the arrays that no step changes: the base of LoRA, whose adapters are `model_params`.
        recorded: what the loop computes, by which a loop that resumes it is compared.
    """

    model_params: PyTree = field(repr=False)
    model_state: PyTree = field(repr=False)
    optimizer_state: PyTree = field(repr=False)
    grads: PyTree = field(repr=False)
    loss: float
    n_completed_steps: int
    elapsed_time: float
    step: int
    rng: Any = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    loop_state: LoopState | None = field(default=None, repr=False)
    frozen: PyTree = field(default_factory=dict, repr=False)
    recorded: Recorded | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Summary(Checkpoint):
    """A checkpoint with metrics, in groups such as "train" and "eval"."""

    metrics: Mapping[str, Metrics] = field(default_factory=dict)


def summarised(checkpoint: Checkpoint, group: str, metrics: Metrics) -> Summary:
    """`checkpoint` with these metrics under `group`, besides those that it has."""
    own = {item.name: getattr(checkpoint, item.name) for item in fields(Checkpoint)}
    return Summary(**own, metrics={**metrics_of(checkpoint), group: dict(metrics)})


def metrics_of(checkpoint: Checkpoint) -> dict[str, Metrics]:
    """The metrics of a summary by group; of a checkpoint, those of training."""
    if isinstance(checkpoint, Summary):
        return dict(checkpoint.metrics)
    train = {
        "seconds_per_step": checkpoint.elapsed_time / max(1, checkpoint.n_completed_steps),
        "gradients_l2norm": float(global_norm(checkpoint.grads)),
        "weights_l2norm": float(global_norm(checkpoint.model_params)),
        "loss": float(checkpoint.loss),
    }
    return {"train": train}


def by_full_name(checkpoint: Checkpoint) -> dict[str, float]:
    """The metrics of all groups, each under "group/label"."""
    groups = metrics_of(checkpoint).items()
    return {f"{group}/{label}": float(value) for group, named in groups for label, value in named.items()}


def state_of(checkpoint: Checkpoint) -> TrainState:
    """The training state of a checkpoint, to resume from."""
    if checkpoint.rng is None:
        raise ValueError(
            f"The checkpoint of step {checkpoint.step} has no `rng`: it was not created by a `TrainLoop`, and cannot "
            "be resumed exactly. Use the checkpoints of the loop, or set `rng`, `extra` and `loop_state`."
        )
    return TrainState(
        step=jnp.asarray(checkpoint.step, jnp.int32),
        params=checkpoint.model_params,
        model_state=checkpoint.model_state,
        opt_state=checkpoint.optimizer_state,
        rng=jnp.asarray(checkpoint.rng),
        extra=dict(checkpoint.extra),
        frozen=checkpoint.frozen,
    )


# processors of checkpoints


def serial(*processors: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `processors` in order, each with the result of the previous one.

    A processor that returns None passes its argument on.

    >>> seen = []
    >>> serial(lambda x: x + 1, seen.append, lambda x: 10 * x)(1), seen
    (20, [2])
    """
    for number, processor in enumerate(processors):
        if not callable(processor):
            raise TypeError(f"Processor {number} is a {type(processor).__name__}, which cannot be called.")

    def process(checkpoint: Any) -> Any:
        for processor in processors:
            returned = processor(checkpoint)
            checkpoint = checkpoint if returned is None else returned
        return checkpoint

    return process


class SummaryLogger:
    """Prints a report of every checkpoint or summary that it is called with; returns it.

    >>> logger = SummaryLogger()
    """

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Prints the report of `summary`."""
        metrics, head = metrics_of(summary), f"Step {summary.step:6d}:"
        group_width = max([_GROUP, *map(len, metrics)])
        label_width = max([_LABEL, *(len(label) for named in metrics.values() for label in named)])
        lines = [f"{head} Ran {summary.n_completed_steps} train steps in {summary.elapsed_time:.2f} seconds"]
        for group, named in metrics.items():
            start = f"{head} {group:<{group_width}}"
            lines += [f"{start} {label:>{label_width}} | {value:.8f}" for label, value in named.items()]
        OUT.write("\n" + "".join(f"{line}\n" for line in lines))
        return summary


class SummaryWriter:
    """Writes the metrics of every checkpoint or summary that it is called with to TensorBoard; returns it.

    All metrics go to one file, as "group/label", and are on disk when it returns. Needs the extra `tensorboard`.
    """

    def __init__(self, output_dir: str | Path) -> None:
        TensorboardToolLogger.require()
        self._folder = Path(output_dir).absolute()
        self._tool: TensorboardToolLogger | None = None

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Writes the metrics of `summary`."""
        if self._tool is None:
            self._tool = TensorboardToolLogger(TensorboardConfig(), self._folder)
            self._close = weakref.finalize(self, self._tool.close, "completed")
        self._tool.write(summary.step, by_full_name(summary))
        self._tool.flush()
        return summary

    def close(self) -> None:
        """Closes the file; later metrics go to a new one."""
        if self._tool is not None:
            self._close()
            self._tool = None


# writers and readers of files


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
