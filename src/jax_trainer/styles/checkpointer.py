"""`get_default_checkpointer`: a hook that saves checkpoints, and functions that restore the best and the latest."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jax_trainer.adapters.nnx_objects import NnxObjects
from jax_trainer.checkpoint import ranking
from jax_trainer.checkpoint.errors import damage
from jax_trainer.checkpoint.ranking import Mode
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint, SaveError
from jax_trainer.config.settings import checked
from jax_trainer.core import PyTree, TrainState, step_of
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine import Edited, Event, Every, FitEnd, FitStart, LoopState, SavePoint, StepMetrics
from jax_trainer.runs import Fingerprint, Recorded, loop_state_of, recorded_facts, resuming
from jax_trainer.styles.hooks import MetricReport, Training, TrainingHook, numbers

LOG = logging.getLogger("jax_trainer")
TRAINED = ("step", "params", "model_state", "opt_state")  # fields of a state that the model and the optimizer have
Restore = Callable[..., Any]


@checks_keywords
def get_default_checkpointer(
    outfolder: str | Path,
    *,
    save_every_n_steps: int,
    max_to_keep: int = 5,
    criterion_key: str = "val/loss",
    best_mode: Mode = "auto",
) -> tuple["SaveHook", Restore, Restore]:
    """Returns a hook for `train_fn` that saves checkpoints, and the functions `restore_best` and `restore_last`.

    The functions take `(model, optimizer)`, or an optimizer that has its model; they update these objects in place, and
    return them. They wait for a pending save, and raise its `SaveError` if it failed. Without a checkpoint they log a
    warning and change nothing. A training with the hook that starts from a restored checkpoint resumes it; the result
    is bit-identical to an uninterrupted training.

    Args:
        outfolder: folder of the checkpoints; created when training starts.
        save_every_n_steps: steps between two checkpoints. The last step is also saved, as is the current state of a
            training that is interrupted or fails.
        max_to_keep: number of best checkpoints to keep, besides the two latest.
        criterion_key: the metric that selects the best checkpoint, by the name that hooks see.
        best_mode: "min" or "max"; "auto" infers it from the metric's name.
    """
    mode = ranking.best_mode(best_mode, criterion_key, key="best_mode")
    store = CheckpointStore(Path(outfolder), keep_latest=2, keep_best=max_to_keep, monitor=criterion_key, mode=mode)

    def restore_best(*objects: Any) -> Any:
        """Restores the best checkpoint into a model and its optimizer."""
        return _restore(store, "best", objects)

    def restore_last(*objects: Any) -> Any:
        """Restores the latest checkpoint into a model and its optimizer."""
        return _restore(store, "latest", objects)

    return SaveHook(store, save_every_n_steps, criterion_key), restore_best, restore_last


def _restore(store: CheckpointStore, which: Literal["best", "latest"], objects: tuple[Any, ...]) -> Any:
    restored = NnxObjects.of(*(objects if len(objects) == 2 else (None, objects[0])))
    store.wait()
    has_no_best = which == "best" and store.best() is None and store.all()
    if has_no_best or not store.infos():  # where all are damaged, `restore` raises
        LOG.warning(f"No {which} checkpoint in {store.folder}: model and optimizer are unchanged.")
    else:
        state, saved = store.restore(which, restored.state(jax.random.key(0)), only=TRAINED, check=_usable)
        restored.update(state)
        LOG.info(f"Restored step {saved.step} from {saved.path}.")
    return objects if len(objects) == 2 else objects[0]


def _usable(saved: SavedCheckpoint) -> None:
    """Raises a `CheckpointError` if a training cannot be resumed from the record of this checkpoint."""
    loop_state_of(saved)
    with damage(saved.path, "the states of the hooks"):
        if saved.callbacks:
            of_callbacks = saved.callbacks.get("callbacks", {})
            checked({"callbacks": {}, **saved.callbacks}, {"report": object, "hooks": object, "callbacks": dict})
            checked(of_callbacks, dict.fromkeys(of_callbacks, dict))
            MetricReport(Every()).load_state_dict(saved.callbacks["report"])
            checked(saved.callbacks["hooks"], {"called_at": list[int]})


class SaveHook(TrainingHook):
    """Saves checkpoints: in `train_fn`, as an observer in the background, all that is needed to resume exactly.

    Called in a custom loop, it saves the model and the optimizer.
    """

    # of the current training
    fingerprint: Fingerprint  # what it computes
    allow_changes: Collection[str]  # parts in which it may differ from the one that it resumes
    _recorded: Recorded
    _training: Training
    _first: int  # its first step
    _saved: tuple[int, bool]  # the step of the last save, and whether it had been evaluated
    _edited: int  # the step at which an edit changed the weights last

    def __init__(self, store: CheckpointStore, every_n_steps: int, criterion: str) -> None:
        self._store, self._criterion = store, criterion
        self.every_n_steps = checked_int("save_every_n_steps", every_n_steps, 1)
        self.saves_every = Every(steps=self.every_n_steps)

    def __call__(
        self, step: int, *, model: Any, optimizer: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Saves in a custom loop if `step` is due; `metrics` are those of this step, if any."""
        if step % self.every_n_steps == 0:
            state = NnxObjects.of(model, optimizer).state(jax.random.key(0))
            state = state.replace(step=jax.numpy.full_like(state.step, step))
            self._store.save(state, Position(), self._compared(metrics or {}), wait=False)

    # in `train_fn`

    def check(self, reported: Iterable[str] | None) -> None:
        """Refuses an unknown criterion; warns if no saved state will have been evaluated."""
        if reported is None:
            LOG.warning(f"No validation data: no checkpoint can be the best by `criterion_key={self._criterion!r}`.")
            return
        known = sorted(reported)
        if self._criterion not in known:
            raise ValueError(
                f"`criterion_key` is {self._criterion!r}, which is not reported. Reported metrics: {', '.join(known)}."
            )

    def start(self, state: TrainState, training: Training) -> tuple[TrainState, SavedCheckpoint] | None:
        """Starts a training; returns the checkpoint with exactly these weights, if any, from which it resumes.

        Refuses to mix two trainings in one folder.
        """
        self._training = training
        step, checkpoints = step_of(state), self._store.all()
        trains = step < training.last  # otherwise nothing in the folder changes
        for saved in checkpoints:
            if saved.step == step and (restored := self._same(state, saved)) is not None:
                if trains:
                    at = loop_state_of(saved)
                    edits = at.edits if isinstance(at, LoopState) else ()
                    folder, fingerprint = self._store.folder, self.fingerprint
                    before = recorded_facts(folder)
                    self._recorded = resuming(folder, before, fingerprint, self.allow_changes, step, edits)
                    self._store.mark_resumed_from(saved)
                return restored, saved
        if trains and (later := [saved.step for saved in checkpoints if saved.step >= step]):
            raise CheckpointError(
                f"{self._store.folder} has checkpoints of another training, up to step {later[-1]}, and this one "
                f"starts at step {step}. Call `restore_last(model, optimizer)` first to resume that training, or use "
                "another folder."
            )
        self._recorded = Recorded(self.fingerprint.facts)
        return None

    def handle(self, event: Event) -> None:
        """Saves when due, at the last step, and when a training ends early."""
        match event:
            case FitStart():
                self._first, self._saved, self._edited = event.step, (0, False), 0
                self._store.prepare(event.state)
            case Edited():  # the state of a step that may have been saved already
                self._saved = (0, False)
                self._edited = event.step if any(edit.changes_weights for edit in event.edits) else self._edited
            case StepMetrics():
                self._store.check()
            case SavePoint() if event.step > self._first and self._is_due(event):
                is_evaluated = event.step != self._edited  # otherwise other weights were
                metrics = self._compared(self._training.report.evaluated(event.step) if is_evaluated else {})
                if self._saved != (event.step, bool(metrics)):
                    self._save(event, metrics)
                    self._saved = (event.step, bool(metrics))
            case FitEnd():
                (self._store.completed if event.status in ("completed", "stopped") else self._store.wait)()

    def _is_due(self, event: SavePoint) -> bool:
        if event.reason is not None:
            return not isinstance(event.reason, SaveError)
        is_time = self.saves_every.at_step(event.step) or event.step == self._training.last
        return is_time and self._training.report.is_settled(event)

    def _save(self, event: SavePoint, metrics: Mapping[str, float]) -> None:
        loop_state = event.loop_state
        self._recorded.write(self._store.folder)
        run = {"loop": loop_state.to_data()}
        states = self._training.states()
        self._store.save(event.state, loop_state.position, metrics, callbacks=states, run=run, wait=False)

    def _compared(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The metrics to save; empty if the criterion is not among them."""
        found = numbers(metrics)
        return found if self._criterion in found else {}

    def _same(self, state: TrainState, saved: SavedCheckpoint) -> TrainState | None:
        """The state of the checkpoint, if its weights equal those of `state`."""
        try:
            restored, _ = self._store.restore(saved, state, only=(*TRAINED, "extra"), partial=True, check=_usable)
        except CheckpointError:
            return None
        return restored if all(_equal(getattr(state, name), getattr(restored, name)) for name in TRAINED) else None


def _equal(a: PyTree, b: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
