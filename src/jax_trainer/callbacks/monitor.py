"""Callbacks that monitor a quantity and log it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.spike_file import SpikeFile
from jax_trainer.callbacks.spikes import Spikes
from jax_trainer.engine import StepMetrics
from jax_trainer.optimizer.reported import METRIC, rates_in
from jax_trainer.settings import Above, AtLeast, Below, checked

LOG = logging.getLogger("jax_trainer")
GRAD_NORM, LOSS = "optimizer/grad_global_norm", "loss"


@dataclass
class LearningRateMonitorConfig(CallbackConfig):
    """When the learning rate is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class LearningRateMonitor(Callback):
    """Logs the learning rate as `optimizer/lr`, before training and at the start of each epoch.

    A trainer with this callback also logs it with the step metrics, as `optimizer/lr_step`. Parameter groups with their
    own rate are `optimizer/lr_<group>`. The rate is read from the state of this library's optimizers and of
    `optax.inject_hyperparams`. The rate of another optimizer cannot be seen and is not logged, with one warning; if
    `ReduceLROnPlateau` scales it, `optimizer/lr_scale` is logged.
    """

    config: LearningRateMonitorConfig

    def reset(self) -> None:
        self._logged_epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """The last logged epoch."""
        return {"logged_epoch": self._logged_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logged_epoch = checked(state, {"logged_epoch": int})["logged_epoch"]

    def on_training_start(self) -> None:
        """Logs the initial rate, unless the run is resumed."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        self._log()

    def _log(self) -> None:
        epoch = self.event.epoch
        if epoch == self._logged_epoch:
            return
        is_first, self._logged_epoch = self._logged_epoch < 0, epoch
        rates = jax.device_get(rates_in(self.state))
        if rates:
            self.run.logger.write(self.event.step, {"epoch": epoch, **{name: float(rates[name]) for name in rates}})
        elif is_first:
            LOG.warning(
                f"`LearningRateMonitor` logs no {METRIC!r}: the state of this optimizer does not contain the rate. "
                "Use `optax.inject_hyperparams(optax.adam)(learning_rate=…)`, or an optimizer of "
                "`jax_trainer.optimizer`."
            )


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
