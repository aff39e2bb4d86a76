"""The weights of a trainer: the current state, the best ones of its last run, how they compare, and a bound model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jax_trainer.adapters.calls import arguments
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.callbacks.callback import state_in_use
from jax_trainer.checkpoint import ranking
from jax_trainer.checkpoint.ranking import Direction
from jax_trainer.core import Batch, CompiledProgram, FlatState, TrainState, copy_state, weights_of
from jax_trainer.core.equations import digest_of
from jax_trainer.datasets import Batch as SizedBatch
from jax_trainer.datasets import Position
from jax_trainer.engine import LoopState
from jax_trainer.runs import KeptBest, Run

Metrics = Mapping[str, Any]
DEFAULT_MONITORS: dict[str, Direction] = {
    "val/val_metric": "min",
    "val/acc": "max",
    "val/loss": "min",
}  # without a `ModelCheckpoint`


class CurrentWeights:
    """The state of a trainer: that of the current run, or the last one; and the best weights of the last run.

    Attributes:
        run: the current run.
        best: the best weights of the last run; None without any, and as soon as other weights are set.
        start: what the last run started from, if the weights are its own; None: they were set.
        is_initial: whether the weights are those with which a training would start anyway.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.best: KeptBest | None = None
        self.start: str | None = None
        self.is_initial = False
        self._flat_state: FlatState | None = None
        self._at: Position | LoopState = Position()
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})  # step and metrics of the last evaluation

    @property
    def last(self) -> FlatState | None:
        """The current state; None before it is initialised."""
        of_run = None if self.run is None else self.run.flat_state
        return self._flat_state if of_run is None else of_run

    def set(self, state: TrainState) -> None:
        """Sets the state; an error while the loop owns it."""
        if self.run is not None and self.run.is_training:
            raise state_in_use()
        if self.run is not None and self.run.flat_state is not None:
            self.run.state = state  # the first step will use it
        self._flat_state, self.best, self.start, self.is_initial = FlatState.of(state), None, None, False

    def digest(self, state: TrainState | None = None) -> str:
        """A digest of the weights of `state`, or of the current ones."""
        assert state is not None or self.last is not None
        found = self.last.state if state is None else state  # type: ignore[union-attr] - as asserted
        return digest_of((found.params, found.model_state, found.frozen))

    def restart(self, *, resume: bool) -> bool:
        """Sets the position to the start of a run; returns whether it starts from the weights that are here."""
        self._at, self._evaluated, self.best = Position(), (-1, {}), None
        if resume:
            self._flat_state = None
        return self._flat_state is not None

    def leave_run(self) -> None:
        """Takes over the state that the run has reached."""
        run, self.run = self.run, None
        if run is not None and run.flat_state is not None:
            self._flat_state, self._at, self._evaluated = run.flat_state, run.at, run.evaluated
            self.is_initial = False
            fingerprint = run.spec.fingerprint
            self.start = None if fingerprint is None else fingerprint.facts["start"]["from"]

    def position(self, step: int) -> tuple[LoopState, dict[str, Any]]:
        """The position of the state at `step`, and the metrics of its last evaluation, if it was evaluated."""
        at, evaluated = (self._at, self._evaluated) if self.run is None else (self.run.at, self.run.evaluated)
        return LoopState.of(at, step), evaluated[1] if evaluated[0] == step else {}


def with_new_optimizer(program: CompiledProgram, key: jax.Array, state: TrainState) -> TrainState:
    """The initial state of a run that starts from the weights of `state`."""
    averaged = {name: copy_state(value) for name, value in state.extra.items() if name == "ema"}
    initial = program.init_from_params(key, weights_of(state), state.model_state)
    return initial.replace(extra={**initial.extra, **averaged})


def monitors_of(metrics: Metrics, saver: ModelCheckpointConfig | None) -> dict[str, Direction]:
    """The metrics by which weights are compared, the first reported one of them, each with "min" or "max"."""
    if saver is not None:
        return {saver.monitor: saver.best_mode}
    sets = dict.fromkeys(name.partition("/")[0] for name in metrics if name.startswith("val"))
    first = "val" if "val" in sets else next(iter(sets), "val")  # several are called "val_<name>"
    return {f"{first}{name.removeprefix('val')}": mode for name, mode in DEFAULT_MONITORS.items()}


def compared_by(metrics: Metrics, saver: ModelCheckpointConfig | None) -> tuple[str, Direction] | None:
    """The first reported one of `monitors_of` that is a number."""
    monitors = monitors_of(metrics, saver).items()
    return next(((name, mode) for name, mode in monitors if name in metrics and np.ndim(metrics[name]) == 0), None)


def is_better(
    new: Metrics, old: Metrics | None, by: tuple[str, Direction] | None, saver: ModelCheckpointConfig | None
) -> bool:
    """Compares the metrics of two validations by one of them; None: it is not reported, an error."""
    if by is None:
        monitors, reported = " or ".join(monitors_of(new, saver)), ", ".join(sorted(new)) or "none"
        raise ValueError(
            f"No metric to compare weights by: {monitors} is not reported. Reported metrics: {reported}. Report one "
            "of the former, set `monitor` of a ModelCheckpoint, or override `is_new_model_better`."
        )
    monitor, mode = by
    if old is None or monitor not in old:
        return True
    return ranking.is_better(float(new[monitor]), float(old[monitor]), mode)


class BoundModel:
    """A module with weights that takes untransformed inputs, as the dataset yields them, and transforms them first.

    Attributes:
        module: the module itself, which takes transformed inputs.
    """

    def __init__(
        self, module: Any, example: Batch, to_input: Callable[[Batch], Any], transform: Callable[[Batch], Batch]
    ) -> None:
        self.module, self._example, self._to_input, self._transform = module, example, to_input, transform

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Transforms the inputs, and calls the module."""
        batch = self._transform(batch_around(inputs, self._example, self._to_input))
        return self.module(*arguments(self._to_input(batch)), **options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`bind_model()` returns a model that transforms its inputs and can only be called; it has no attribute "
            f"{name!r}. Use `bind_model(transforms=False)`, which returns the module itself."
        )

    def __repr__(self) -> str:
        return f"BoundModel({self.module!r})"


def batch_around(inputs: tuple[Any, ...], example: Batch, to_input: Callable[[Batch], Any]) -> Batch:
    """A batch with the structure of `example` and these model inputs; all other arrays are 0.

    >>> batch_around((np.ones((3, 2)),), {"x": np.zeros((8, 2)), "y": np.zeros(8, np.int32)}, lambda batch: batch["x"])
    {'x': array([[1., 1.],
           [1., 1.],
           [1., 1.]]), 'y': array([0, 0, 0], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(example)
    wanted = jax.tree.leaves(to_input(example))
    indices = [next((at for at, leaf in enumerate(leaves) if leaf is one), None) for one in wanted]
    if None in indices:
        raise ValueError(
            "`batch_to_input` computes the model inputs, so a batch to transform cannot be made from them. Use "
            "`bind_model(transforms=False)` with transformed inputs, or `predict` with batches."
        )
    arrays = jax.tree.leaves(inputs)
    if len(arrays) != len(indices):
        raise TypeError(f"The model is called with {len(indices)} arrays, got {len(arrays)}.")
    count = len(arrays[0])
    filled = [np.zeros((count, *leaf.shape[1:]), leaf.dtype) if np.ndim(leaf) else leaf for leaf in leaves]
    for index, one in zip(indices, arrays, strict=True):
        filled[index] = one  # type: ignore[index]  # none of them is None
    batch = jax.tree.unflatten(structure, filled)
    return batch.replace(size=count) if isinstance(batch, SizedBatch) else batch  # type: ignore[attr-defined]
