"""Saves checkpoints to the run folder of a trainer, and loads them."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint
from jax_trainer.core import Batch, MeshLike
from jax_trainer.datasets import DatasetModule, Position
from jax_trainer.engine import LoopState
from jax_trainer.logger.jsonl import save_metrics
from jax_trainer.processes import process_group
from jax_trainer.runs import WEIGHTS, run_and_step
from jax_trainer.runs.spec import store_in
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.experiment import build, stored_run, trainer_class
from jax_trainer.trainer.model_methods import ModelMethods
from jax_trainer.trainer.stored import class_to_load, configs_of, storable

LOG = logging.getLogger("jax_trainer")
FINE_TUNED = ("params", "model_state")
Which = int | Literal["best", "latest"]


class CheckpointMethods(ModelMethods):
    """The run folder of a trainer, its checkpoints, and the position of the state in the data."""

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
        """Name of the model, and default folder of its runs."""
        return self._model.name

    @property
    def has_custom_comparison(self) -> bool:
        """Whether this class overrides `is_new_model_better`."""
        return type(self).is_new_model_better is not TrainerBase.is_new_model_better

    def _own_folder(self, purpose: str) -> RunFolder:
        if self.folder is None:
            raise ValueError(f"This trainer has no run folder to {purpose}. Train first, or pass `folder`.")
        return self.folder

    def _store(self, folder: RunFolder) -> CheckpointStore:
        better = self.is_new_model_better if self.has_custom_comparison else None
        return store_in(folder, self.config.saver, better, is_ranked=True)

    def save_model(self, metrics: Mapping[str, float] | None = None) -> Path:
        """Saves the current state as a checkpoint of its run, with `metrics`.

        Default: the metrics of the last evaluation, if it was of this state.
        """
        folder, state, run = self._own_folder("save to"), self.state, self._run
        at, evaluated = (self._at, self._last_metrics) if run is None else (run.at, dict([run.evaluated]))
        known = evaluated.get(int(state.step), {}) if metrics is None else metrics
        saver = self.config.saver
        unknown = {saver.monitor: math.nan} if known and saver is not None else {}  # never the best
        at = LoopState.of(at, int(state.step))
        seen = {"transforms": self.describe_transforms} if self.device_transforms else {}
        data = {"loop": at.to_data(), **seen}
        return self._store(folder).save(state, at.position, {**unknown, **scalars_of(known)}, run=data)

    def load_model(
        self, epoch_idx: int = -1, raise_if_not_found: bool = True, *, which: Which | None = None
    ) -> SavedCheckpoint | None:
        """Loads the weights of a checkpoint of this run; returns its step, epoch and metrics.

        Without any evaluation there is no best checkpoint, and the latest one is loaded.

        Args:
            epoch_idx: the epoch of the checkpoint; -1: the best one.
            raise_if_not_found: False: without a checkpoint, keep the current weights and return None.
            which: instead of the epoch: "best", "latest", or a step.
        """
        if self.folder is None and not raise_if_not_found:
            return None
        store = self._store(self._own_folder("load from"))
        if not (raise_if_not_found or _has(store, epoch_idx, which)):
            return None
        self.state, saved = store.restore(_chosen(store, epoch_idx, which), like=self.state, only=WEIGHTS)
        if (trained := saved.run.get("transforms")) and not self.has_transforms:
            LOG.warning(
                f"The weights of {saved.path} were trained on batches with the device transforms {trained}, but this "
                "trainer has none: `predict`, `bind_model` and evaluations see raw inputs. Pass `dataset=…`, or data "
                "with `loader.transforms`."
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
        """Loads the weights of another run as initial weights, for fine-tuning.

        Training then starts at step 0 with a new optimizer state. By default the checkpoint must have exactly the
        arrays of this model.

        Args:
            checkpoint: the other run's folder, or the folder of one of its checkpoints.
            which: "best" by the metric that the run monitored (without any: the latest), "latest", or a step.
            rename: names in the checkpoint to names in this model: `{"params.encoder.*": "params.backbone.*"}`; None
                leaves them out, as in `{"params.head.*": None}`, and this model keeps its own.
            partial: load the arrays that both have; all others are left unchanged, and logged.
            cast: convert arrays to this model's precision.
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
        """Rebuilds the trainer of a run from its stored configuration, with the weights of its best checkpoint.

        Args:
            checkpoint: the run folder, which may have been moved, or the folder of one of its checkpoints.
            exmp_input: an example batch, for a run without a stored dataset.
            model, optimizer: for a run to which these were passed in Python.
            dataset: for a run whose dataset is not stored, or to evaluate on another one.
            which: "best", "latest", or a step.
            overrides: of the stored configuration, such as `num_gpus=1`.
            own: arguments of a subclass with a custom `__init__`; those with a default may be left out.
        """
        folder, step = run_and_step(Path(checkpoint))
        stored = stored_run(folder, overrides).value
        kind = class_to_load(cls, trainer_class(stored), folder)
        options = {"exmp_input": exmp_input, "dataset": dataset, "folder": folder, "kind": kind, "own": own}
        trainer = build(stored, model=model, optimizer=optimizer, **options)
        trainer.load_model(which=which if step is None else step)
        return trainer

    @property
    def configs(self) -> dict[str, Any]:
        """All configurations, as stored with the run."""
        return configs_of(self)


def scalars_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars among `metrics`."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def _stored_options(folder: RunFolder) -> dict[str, Any]:
    """How a run selected its best checkpoint."""
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
            raise CheckpointError(
                f"No checkpoint of epoch {epoch} in {store.folder}. Epochs with a checkpoint: {epochs}."
            )
        return found[-1]
    if which in (None, "best"):
        return "latest" if store.best() is None else "best"
    return which
