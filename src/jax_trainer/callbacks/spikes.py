"""`GradientSpikeMonitor`: counts values of the gradient norm and the loss far above their running average."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Annotated, Any

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import Above, AtLeast, Below, checked, hints_of
from jax_trainer.engine import StepMetrics

METRICS = {"grad_norm": "optimizer/grad_global_norm", "loss": "loss"}  # the step metric of each quantity
FILE = "gradient_spikes.npz"
COLUMNS = ("steps", "values", "averages")
COUNTS: tuple[str, ...] = ("grad_norms", "losses", "synchronous", "grad_before_loss", "loss_before_grad")
NEW_LEVEL = 100  # after so many spikes in a row, the average restarts: the values have moved to another level
NEAR = 5  # steps within which a spike of one kind follows one of the other


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
        limit = self.average + (self.threshold - 1) * abs(self.average)
        is_spike = self.seen >= self.warmup and value > limit
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
    count. With `log_to_disk`, `gradient_spikes.npz` has the arrays `grad_norm_steps`, `grad_norm_values`,
    `grad_norm_averages`, `loss_steps` and so on.
    """

    config: GradientSpikeMonitorConfig

    def reset(self) -> None:
        config = self.config
        self._levels = {name: Level(config.ema_decay, config.threshold, config.warmup_steps) for name in METRICS}
        self._counts = dict.fromkeys(COUNTS, 0)  # since they were logged
        self._alone = dict.fromkeys(METRICS, -NEAR - 1)  # the last step at which it was the only one with a spike
        self._spikes: dict[str, list[tuple[int, float, float]]] = {name: [] for name in METRICS}  # for the file
        self._written = -1  # spikes in the file; -1: perhaps others

    def state_dict(self) -> dict[str, Any]:
        """The averages, the counts since the last log, and the spikes of the file."""
        levels = {name: asdict(level) for name, level in self._levels.items()}
        spikes = {name: list(rows) for name, rows in self._spikes.items()}
        return {"levels": levels, "counts": dict(self._counts), "alone": dict(self._alone), "spikes": spikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores averages, counts and spikes; after a rollback the file is truncated, too."""
        each = dict.fromkeys(METRICS, list[tuple[int, Real, Real]])
        checked(state, dict.fromkeys(("levels", "counts", "alone", "spikes"), dict[str, object]))
        levels = checked(state["levels"], dict.fromkeys(METRICS, dict[str, object]))
        self._levels = {name: Level(**checked(level, hints_of(Level))) for name, level in levels.items()}
        self._counts = dict(checked(state["counts"], dict.fromkeys(COUNTS, int)))
        self._alone = dict(checked(state["alone"], dict.fromkeys(METRICS, int)))
        self._spikes = {name: [tuple(row) for row in rows] for name, rows in checked(state["spikes"], each).items()}
        self._written = -1

    def on_steps_reported(self, event: StepMetrics) -> None:
        columns = event.rows.columns
        if METRICS["grad_norm"] not in columns:
            raise ValueError(
                f"`GradientSpikeMonitor` needs the step metric {METRICS['grad_norm']!r}. Step metrics: "
                f"{', '.join(sorted(columns))}. Set `log_grad_norm: true`."
            )
        values = [columns[name].values.tolist() for name in METRICS.values()]
        is_counted = (columns[METRICS["grad_norm"]].weights > 0).tolist()
        for index, (norm, loss) in enumerate(zip(*values, strict=True)):
            if is_counted[index]:
                self.add(event.rows.first + index, norm, loss)

    def add(self, step: int, grad_norm: float, loss: float) -> None:
        """Adds the values of a step."""
        spiked = []
        for name, value in (("grad_norm", grad_norm), ("loss", loss)):
            level = self._levels[name]
            average = level.average
            if level.update(value):
                spiked.append(name)
                if self.config.log_to_disk:
                    self._spikes[name].append((step, value, average))
        counts, alone = self._counts, self._alone
        counts["grad_norms"] += "grad_norm" in spiked
        counts["losses"] += "loss" in spiked
        match spiked:
            case [_, _]:
                counts["synchronous"] += 1
            case ["grad_norm"]:
                counts["loss_before_grad"] += step - alone["loss"] <= NEAR
                alone["grad_norm"] = step
            case ["loss"]:
                counts["grad_before_loss"] += step - alone["grad_norm"] <= NEAR
                alone["loss"] = step

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        counts = {f"optimizer/spikes_{name}": count for name, count in self._counts.items()}
        self.run.logger.write(self.event.step, {"epoch": epoch, **counts})
        self._counts = dict.fromkeys(COUNTS, 0)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self._write()

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        self._write()

    def finalize(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        """Replaces the file, if it has other spikes. A resumed run has them from its checkpoint."""
        file, count = self.run.folder / FILE, sum(map(len, self._spikes.values()))
        if not (self.config.log_to_disk and self.is_primary and self._written != count and (count or file.exists())):
            return
        arrays = {
            f"{name}_{column}": np.array([row[index] for row in rows], np.float64 if index else np.int64)
            for name, rows in self._spikes.items()
            for index, column in enumerate(COLUMNS)
        }
        partial = file.with_name(f".partial-{FILE}")
        with partial.open("wb") as opened:
            np.savez(opened, allow_pickle=False, **arrays)
        os.replace(partial, file)
        self._written = count
