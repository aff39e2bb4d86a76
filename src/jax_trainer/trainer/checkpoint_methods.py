"""The folder of a trainer's run: saving to it, and loading from it."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jax_trainer.callbacks import merged_names
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint
from jax_trainer.core import Batch, MeshLike
from jax_trainer.datasets import DatasetModule, Position
from jax_trainer.engine import EpochEnd, EvalRoundEnd, Event, LoopState, SavePoint, StepEnd
from jax_trainer.logger.jsonl import save_metrics
from jax_trainer.processes import process_group
from jax_trainer.runs import WEIGHTS, run_and_step
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.experiment import build, stored_run, trainer_class
from jax_trainer.trainer.model_methods import ModelMethods
from jax_trainer.trainer.stored import configs_of, kind_for, storable

LOG = logging.getLogger("jax_trainer")
FINE_TUNED = ("params", "model_state")
Which = int | Literal["best", "latest"]


class CheckpointMethods(ModelMethods):
    """Knows the folder of its run, and where in the data and among the validations the state stands."""

    def __init__(
        self,
        config: Any,
        model: Any,
        optimizer: Any,
        exmp_input: Batch,
        mesh: MeshLike | None,
        dataset: DatasetModule | None,
        other_configs: Mapping[str, Any] | None,
        folder: RunFolder | None,
    ) -> None:
        super().__init__(config, model, optimizer, exmp_input, mesh, dataset)
        self.folder = folder
        self.other_configs = storable(other_configs or {})
        self._at: Position | LoopState = Position()
        self._last_metrics: dict[int, dict[str, Any]] = {}

    @property
    def model_name(self) -> str:
        """What the model is called; runs are put into a folder of this name."""
        return self._model.name

    @property
    def compares_itself(self) -> bool:
        """Whether this class has its own idea of which weights are the best."""
        return type(self).is_new_model_better is not TrainerBase.is_new_model_better

    def track(self, event: Event) -> None:
        """Keeps up with a run: the state and the position in the data after each event."""
        self._held = event.flat_state
        match event:
            case StepEnd() | EpochEnd():
                self._at = event.position
            case SavePoint():
                self._at = event.loop_state
            case EvalRoundEnd():
                self._last_metrics = {event.step: merged_names(event.metrics)}

    def _own_folder(self, purpose: str) -> RunFolder:
        if self.folder is None:
            raise ValueError(f"This trainer has no run folder yet to {purpose}. Train first, or pass `folder`.")
        return self.folder

    def _store(self, folder: RunFolder, *, validates: bool = True) -> CheckpointStore:
        saver = self.config.saver
        options = {} if saver is None else saver.store_options(validates=validates, monitors=not self.compares_itself)
        if self.compares_itself and validates:
            options["better"] = self.is_new_model_better
        return CheckpointStore(folder.checkpoints, **options)

    def save_model(self, metrics: Mapping[str, float] | None = None) -> Path:
        """Saves the present state as a checkpoint of its run; `metrics` are what it was judged by.

        Left out, they are those of the last evaluation, if that was of this state.
        """
        folder, state = self._own_folder("save to"), self.state
        known = self._last_metrics.get(int(state.step), {}) if metrics is None else metrics
        saver = self.config.saver
        unknown = {saver.monitor: math.nan} if known and saver is not None else {}  # never the best
        at = LoopState.of(self._at, int(state.step))
        seen = {"transforms": self.describe_transforms} if self.device_transforms else {}
        run = {"loop": at.to_data(), **seen}
        return self._store(folder).save(state, at.position, {**unknown, **scalars_of(known)}, run=run)

    def load_model(
        self, epoch_idx: int = -1, raise_if_not_found: bool = True, *, which: Which | None = None
    ) -> SavedCheckpoint | None:
        """Takes the weights of a checkpoint of this run, and returns which it is: its step, epoch and metrics.

        Where nothing was judged there is no best one, and the latest is taken: so does the test after training.

        Args:
            epoch_idx: the epoch after which it was saved; -1: the best.
            raise_if_not_found: otherwise the present weights stay where there is no checkpoint.
            which: instead of the epoch: "best", "latest", or a step.
        """
        if self.folder is None and not raise_if_not_found:
            return None
        store = self._store(self._own_folder("load from"))
        if not (raise_if_not_found or _has(store, epoch_idx, which)):
            return None
        self.state, saved = store.restore(_chosen(store, epoch_idx, which), like=self.state, only=WEIGHTS)
        if (trained := saved.run.get("transforms")) and not self.sees_transformed:
            LOG.warning(
                f"The weights of {saved.path} were trained on batches with the device transforms {trained}, and this "
                "trainer has none: `predict`, `bind_model` and evaluations see raw inputs. Pass `dataset=…`, or data "
                "that carries them as `loader.transforms`."
            )
        return saved

    def load_weights(
        self,
        checkpoint: str | Path,
        *,
        which: Which = "best",
        rename: Mapping[str, str | None] | None = None,
        partial: bool = False,
        cast: bool = False,
    ) -> None:
        """Takes the weights of another run, to begin training with: for fine-tuning.

        Training then begins at step 0 with an optimizer that has seen nothing. By default the checkpoint must have
        exactly the arrays of this model.

        Args:
            checkpoint: the other run's folder, or that of one of its checkpoints.
            which: "best" by what that run monitored (where it judged nothing: the latest), "latest", or a step.
            rename: names in the checkpoint to names in this model: `{"params.encoder.*": "params.backbone.*"}`; None
                leaves them out, as in `{"params.head.*": None}`, and this model keeps its own.
            partial: what the checkpoint lacks stays as it is, and what only it has is left out; both are told.
            cast: convert numbers to this model's precision.
        """
        folder, step = run_and_step(Path(checkpoint))
        store = CheckpointStore(folder.checkpoints, **_stored_options(folder))
        chosen = _chosen(store, -1, which if step is None else step)
        options: dict[str, Any] = {"rename": rename, "partial": partial, "cast": cast}
        self.state = store.restore(chosen, like=self.state, only=FINE_TUNED, **options)[0]

    def save_metrics(self, filename: str, metrics: Mapping[str, Any]) -> None:
        """Writes `metrics` to `metrics/<filename>.json` in the run's folder."""
        if process_group().is_primary:
            save_metrics(self._own_folder("write to").path, filename, metrics)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint: str | Path,
        exmp_input: Batch | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        dataset: DatasetModule | None = None,
        which: Which = "best",
        overrides: Sequence[str] = (),
        **own: Any,
    ) -> Self:
        """The trainer of a run as its stored configuration says, with the weights of its best checkpoint.

        Args:
            checkpoint: the run's folder, wherever it is now, or that of one of its checkpoints.
            exmp_input: an example batch, for a run whose dataset is not stored with it.
            model, optimizer: for a run that was given these in Python.
            dataset: for a run that had one which is not stored with it, or to judge on another.
            which: "best", "latest", or a step.
            overrides: of the stored configuration, such as `num_gpus=1`.
            own: arguments of a subclass that has an `__init__` of its own; those with a default may be left out.
        """
        folder, step = run_and_step(Path(checkpoint))
        stored = stored_run(folder, overrides).value
        kind = kind_for(cls, trainer_class(stored), folder)
        options = {"exmp_input": exmp_input, "dataset": dataset, "folder": folder, "kind": kind, "own": own}
        trainer = build(stored, model=model, optimizer=optimizer, **options)
        trainer.load_model(which=which if step is None else step)
        return trainer

    @property
    def configs(self) -> dict[str, Any]:
        """All configurations, as they are stored with the run."""
        return configs_of(self)


def scalars_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of `metrics` that are single numbers."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def _stored_options(folder: RunFolder) -> dict[str, Any]:
    """How a run has told its best checkpoint."""
    saver = stored_run(folder).value.trainer.saver
    return {} if saver is None else {"monitor": saver.monitor, "mode": saver.best_mode}


def _has(store: CheckpointStore, epoch: int, which: Which | None) -> bool:
    if which is None and epoch != -1:
        return any(saved.epoch == epoch for saved in store.all())
    return which in store.steps() if isinstance(which, int) else bool(store.steps())


def _chosen(store: CheckpointStore, epoch: int, which: Which | None) -> Any:
    if which is None and epoch != -1:
        found = [saved for saved in store.all() if saved.epoch == epoch]
        if not found:
            epochs = ", ".join(str(saved.epoch) for saved in store.all()) or "none"
            raise CheckpointError(f"There is no checkpoint of epoch {epoch} in {store.folder}. There are: {epochs}.")
        return found[-1]
    if which in (None, "best"):
        return "latest" if store.best() is None else "best"
    return which
