"""`GradientSpikeMonitor`: counts values of the gradient norm and the loss far above their running average."""

import logging
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import Above, AtLeast, Below, checked, hints_of
from jax_trainer.engine import StepMetrics

LOG = logging.getLogger("jax_trainer")
GRAD_NORM, LOSS = "optimizer/grad_global_norm", "loss"
FILE = "gradient_spikes.npz"
COLUMNS = ("steps", "values", "averages")
COUNTS: tuple[str, ...] = ("grad_norms", "losses", "synchronous", "grad_before_loss", "loss_before_grad")
NEW_LEVEL = 100  # after so many spikes in a row, the average restarts: the values have moved to another level
NEAR = 5  # steps within which a spike of one kind follows one of the other

Spike = tuple[int, float, float]  # step, value, average at that step


@dataclass
class Level:
    """The exponential moving average of a quantity, without its spikes.

    A value is a spike if it exceeds `threshold` times the average of the values before, after `warmup` values. (If the
    average is negative, the same distance above it counts.) A non-finite value is always a spike.
    """

    decay: float
    threshold: float
    warmup: int
    total: float = 0.0  # weighted sum of the values
    weight: float = 0.0  # sum of the weights; tends to 1
    seen: int = 0
    in_a_row: int = 0

    @property
    def average(self) -> float:
        """The current average; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0

    def update(self, value: float) -> bool:
        """Adds `value` to the average unless it is a spike; returns whether it is."""
        if not math.isfinite(value):
            return True
        is_spike = self._is_far(value)
        self.in_a_row = self.in_a_row + 1 if is_spike else 0
        if self.in_a_row >= NEW_LEVEL:
            self.total = self.weight = 0.0
            self.seen = self.in_a_row = 0
        elif is_spike:
            return True
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)
        self.seen += 1
        return False

    def _is_far(self, value: float) -> bool:
        return self.seen >= self.warmup and value > self.average + (self.threshold - 1) * abs(self.average)


@dataclass
class Spikes:
    """Counts the spikes of the gradient norm and the loss, by kind.

    A step is `synchronous` if both quantities spike. A spike of one quantity alone, at most 5 steps after one of the
    other alone, counts as following it.
    """

    grad_norm: Level
    loss: Level
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    last_grad_norm: int = -NEAR - 1  # step of the last spike of the norm alone
    last_loss: int = -NEAR - 1

    @classmethod
    def of(cls, decay: float, threshold: float, warmup: int) -> "Spikes":
        """The state before the first step."""
        return cls(Level(decay, threshold, warmup), Level(decay, threshold, warmup))

    def add(self, step: int, grad_norm: float, loss: float) -> tuple[bool, bool]:
        """Adds the values of a step; returns whether the norm and whether the loss was a spike."""
        found = self.grad_norm.update(grad_norm), self.loss.update(loss)
        counts = self.counts
        counts["grad_norms"] += found[0]
        counts["losses"] += found[1]
        match found:
            case True, True:
                counts["synchronous"] += 1
            case True, False:
                counts["loss_before_grad"] += step - self.last_loss <= NEAR
                self.last_grad_norm = step
            case False, True:
                counts["grad_before_loss"] += step - self.last_grad_norm <= NEAR
                self.last_loss = step
        return found

    def pop_counts(self) -> dict[str, int]:
        """Returns and resets the counts."""
        counts, self.counts = self.counts, dict.fromkeys(COUNTS, 0)
        return counts

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Spikes":
        """Restores the result of `state_dict`; a `ValueError` for other data."""
        levels = ("grad_norm", "loss")
        checked(state, {**hints_of(cls), **dict.fromkeys((*levels, "counts"), dict[str, object])})
        restored = {name: Level(**checked(state[name], hints_of(Level))) for name in levels}
        return cls(**{**state, **restored, "counts": dict(checked(state["counts"], dict.fromkeys(COUNTS, int)))})


class SpikeFile:
    """`gradient_spikes.npz`: steps, values and averages of the spikes of each quantity.

    The arrays are called `grad_norm_steps`, `grad_norm_values`, `grad_norm_averages`, `loss_steps` and so on. All
    processes have the same spikes, and the primary one `writes`.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._path, self._writes = folder / FILE, writes
        self._rows: dict[str, list[Spike]] = {"grad_norm": [], "loss": []}
        self._written = dict.fromkeys(self._rows, 0)  # number of rows in the file
        self._is_dirty = False

    def add(self, quantity: str, step: int, value: float, average: float) -> None:
        """Adds a spike; `write` writes it to the file."""
        self._rows[quantity].append((step, value, average))
        self._is_dirty = True

    @property
    def unwritten(self) -> dict[str, list[Spike]]:
        """The spikes that are not in the file yet; saved with checkpoints."""
        return {quantity: rows[self._written[quantity] :] for quantity, rows in self._rows.items()}

    def write(self) -> None:
        """Replaces the file atomically, if there are new spikes."""
        if not self._is_dirty:
            return
        if self._writes:
            self._replace()
        self._is_dirty, self._written = False, {quantity: len(rows) for quantity, rows in self._rows.items()}

    def _replace(self) -> None:
        partial = self._path.with_name(f".partial-{FILE}")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays())
            file.flush()
            os.fsync(file.fileno())  # the next checkpoint no longer contains these rows
        os.replace(partial, self._path)

    def resume(self, step: int, unwritten: Mapping[str, Any] | None = None) -> None:
        """Removes spikes after `step`, which will be added again, and adds those that were `unwritten` then."""
        known = {quantity: [tuple(row) for row in (unwritten or {}).get(quantity, ())] for quantity in self._rows}
        for quantity, rows in self._read(step).items():
            merged = {row[0]: row for row in (*rows, *known[quantity])}  # they may have been written since
            self._rows[quantity] = [merged[at] for at in sorted(merged)]
        self._is_dirty |= any(known.values())
        self.write()

    def _read(self, step: int) -> dict[str, list[Spike]]:
        nothing: dict[str, list[Spike]] = {quantity: [] for quantity in self._rows}
        if not self._path.exists():
            return nothing
        self._is_dirty = True
        try:
            with np.load(self._path, allow_pickle=False) as found:
                columns = {name: [found[f"{name}_{column}"].tolist() for column in COLUMNS] for name in self._rows}
            rows = {name: list(zip(*column, strict=True)) for name, column in columns.items()}
            return {name: [row for row in found if row[0] <= step] for name, found in rows.items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            LOG.warning(f"{self._path} cannot be read, and is replaced. {type(problem).__name__}: {problem}")
            return nothing

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            f"{quantity}_{column}": np.array([row[index] for row in rows], np.float64 if index else np.int64)
            for quantity, rows in self._rows.items()
            for index, column in enumerate(COLUMNS)
        }


@dataclass
class GradientSpikeMonitorConfig(CallbackConfig):
    """What counts as a spike of the gradients or the loss.

    Args:
        every_n_epochs: log the counts of n epochs every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
        threshold: a spike exceeds the running average by this factor.
        log_to_disk: also save the spikes to `gradient_spikes.npz`.
        ema_decay: decay rate of the exponential moving average.
        warmup_steps: number of steps before spikes are detected; until then only non-finite values are spikes.
    """

    threshold: Annotated[float, Above(1)] = 2.0
    log_to_disk: bool = False
    ema_decay: Annotated[float, AtLeast(0), Below(1)] = 0.995
    warmup_steps: Annotated[int, AtLeast(1)] = 20


@register
class GradientSpikeMonitor(Callback):
    """Counts steps whose gradient norm or loss is far above its running average; spikes do not enter the average.

    Logged per epoch, as `optimizer/spikes_…`: `grad_norms` and `losses` are the spikes of each, `synchronous` the steps
    that are both, `grad_before_loss` and `loss_before_grad` those where one is followed by the other within 5 steps.
    After 100 spikes in a row the quantity has moved to another level, and its average restarts. Skipped steps do not
    count.
    """

    config: GradientSpikeMonitorConfig

    def reset(self) -> None:
        config = self.config
        self._spikes = Spikes.of(config.ema_decay, config.threshold, config.warmup_steps)
        self._step = 0  # the last one that was checked
        self._file: SpikeFile | None = None
        self._unwritten: Mapping[str, Any] = {}  # spikes that a resumed run adds to its file

    def state_dict(self) -> dict[str, Any]:
        """The averages, the counts since the last log, and the spikes that are not in the file yet."""
        unwritten = self._unwritten if self._file is None else self._file.unwritten
        return {"step": self._step, "spikes": self._spikes.state_dict(), "unwritten": unwritten}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores averages and counts; after a rollback the file is truncated, too."""
        checked(state, {"step": int, "spikes": object, "unwritten": dict[str, list[tuple[int, Real, Real]]]})
        self._step, self._unwritten = state["step"], state["unwritten"]
        self._spikes = Spikes.from_state(state["spikes"])
        if self._file is not None:
            self._open_file()

    def on_training_start(self) -> None:
        """Opens the file, also that of a resumed run."""
        if self.config.log_to_disk and self.is_primary:
            self._step = self.event.step
            self._open_file()

    def on_steps_reported(self, event: StepMetrics) -> None:
        columns = event.rows.columns
        if GRAD_NORM not in columns:
            raise ValueError(
                f"`GradientSpikeMonitor` needs the step metric {GRAD_NORM!r}. Step metrics: "
                f"{', '.join(sorted(columns))}. Set `log_grad_norm: true`."
            )
        norms, losses = (columns[name].values.tolist() for name in (GRAD_NORM, LOSS))
        is_counted = (columns[GRAD_NORM].weights > 0).tolist()
        for index, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
            self._step = event.rows.first + index
            if is_counted[index]:
                self._check(self._step, norm, loss)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        counts = {f"optimizer/spikes_{name}": count for name, count in self._spikes.pop_counts().items()}
        self.run.logger.write(self.event.step, {"epoch": epoch, **counts})

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self._write()

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Writes the file, since a checkpoint may follow."""
        self._write()

    def finalize(self, status: str) -> None:
        self._write()

    def _check(self, step: int, norm: float, loss: float) -> None:
        spikes = self._spikes
        averages = spikes.grad_norm.average, spikes.loss.average
        found = spikes.add(step, norm, loss)
        if self._file is not None and any(found):
            values = zip(("grad_norm", "loss"), (norm, loss), averages, found, strict=True)
            for quantity, value, average, is_spike in values:
                if is_spike:
                    self._file.add(quantity, step, value, average)

    def _open_file(self) -> None:
        self._file = SpikeFile(self.run.folder, writes=self.is_primary)
        self._file.resume(self._step, self._unwritten)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write()
