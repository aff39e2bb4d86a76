"""Callbacks that watch a quantity and log it."""

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
        every_n_epochs: epochs between two logged values; -1: every epoch, 0: never.
        every_n_minutes: has no meaning here.
    """


@register
class LearningRateMonitor(Callback):
    """Logs the learning rate as `optimizer/lr`, before the first epoch and at the beginning of each.

    A trainer that has one also logs it with the metrics of steps, as `optimizer/lr_step`. Groups of parameters with a
    rate of their own are `optimizer/lr_<group>`. The rate can be seen in the state of the optimizers of this library
    and of `optax.inject_hyperparams`; of others, one line says that it cannot.
    """

    config: LearningRateMonitorConfig

    def reset(self) -> None:
        """Has logged nothing."""
        self._logged_epoch = -1

    def state_dict(self) -> dict[str, Any]:
        """Which epoch was logged last."""
        return {"logged_epoch": self._logged_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An epoch that goes on is not logged again."""
        self._logged_epoch = checked(state, {"logged_epoch": int})["logged_epoch"]

    def on_training_start(self) -> None:
        """Logs where the schedule begins, unless training goes on from a checkpoint."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        """Logs what the epoch begins with."""
        self._log()

    def _log(self) -> None:
        epoch = self.event.epoch
        if epoch == self._logged_epoch:
            return
        is_first, self._logged_epoch = self._logged_epoch < 0, epoch
        rates = jax.device_get(rates_in(self.state.opt_state))
        if rates:
            self.run.logger.write(self.event.step, {"epoch": epoch, **{name: float(rates[name]) for name in rates}})
        elif is_first:
            LOG.warning(
                f"`LearningRateMonitor` logs no {METRIC!r}: the state of this optimizer does not have the rate. "
                "Make it by `optax.inject_hyperparams(optax.adam)(learning_rate=…)`, or take an optimizer of "
                "`jax_trainer.optimizer`."
            )


@dataclass
class GradientSpikeMonitorConfig(CallbackConfig):
    """What counts as a spike of the gradients or the loss.

    Args:
        every_n_epochs: epochs between two logged counts, which cover all of them; -1: every epoch, 0: never.
        every_n_minutes: has no meaning here.
        threshold: a spike is more than this many times the average of the steps before.
        log_to_disk: also keep the spikes themselves, in `gradient_spikes.npz`.
        ema_decay: the share of the average that stays per step.
        warmup_steps: so many steps make the first average; before, only what is not finite is a spike.
    """

    threshold: Annotated[float, Above(1)] = 2.0
    log_to_disk: bool = False
    ema_decay: Annotated[float, AtLeast(0), Below(1)] = 0.995
    warmup_steps: Annotated[int, AtLeast(1)] = 20


@register
class GradientSpikeMonitor(Callback):
    """Counts steps whose gradient norm or loss is far above its running average, which spikes leave as it was.

    Logged per epoch, as `optimizer/spikes_…`: `grad_norms` and `losses` are the spikes of each, `synchronous` the steps
    that are both, `grad_before_loss` and `loss_before_grad` those where one is followed by the other within 5 steps.
    Where 100 steps in a row are spikes, the quantity has moved to another level, and its average begins anew. Steps
    that were skipped do not count.
    """

    config: GradientSpikeMonitorConfig

    def reset(self) -> None:
        """Has seen nothing."""
        config = self.config
        self._spikes = Spikes.of(config.ema_decay, config.threshold, config.warmup_steps)
        self._step = 0  # the last one it has looked at
        self._file: SpikeFile | None = None
        self._unwritten: Mapping[str, Any] = {}  # what a run that goes on adds to its file

    def state_dict(self) -> dict[str, Any]:
        """The averages, the counts since they were logged, and the spikes that are not in the file yet."""
        unwritten = self._unwritten if self._file is None else self._file.unwritten
        return {"step": self._step, "spikes": self._spikes.state_dict(), "unwritten": unwritten}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the averages and the counts; where training goes back, so does the file."""
        checked(state, {"step": int, "spikes": object, "unwritten": dict[str, list[tuple[int, Real, Real]]]})
        self._step, self._unwritten = state["step"], state["unwritten"]
        self._spikes = Spikes.from_state(state["spikes"])
        if self._file is not None:
            self._open_file()

    def on_training_start(self) -> None:
        """Takes in the file of a run that goes on."""
        if self.config.log_to_disk and self.is_primary:
            self._step = self.event.step
            self._open_file()

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Looks at each of the steps."""
        columns = event.rows.columns
        if GRAD_NORM not in columns:
            raise ValueError(
                f"`GradientSpikeMonitor` needs the metric {GRAD_NORM!r}, and steps report only "
                f"{', '.join(sorted(columns))}. Set `log_grad_norm: true`."
            )
        norms, losses = (columns[name].values.tolist() for name in (GRAD_NORM, LOSS))
        heard = (columns[GRAD_NORM].weights > 0).tolist()
        for index, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
            self._step = event.rows.first + index
            if heard[index]:
                self._look(self._step, norm, loss)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Logs the counts."""
        counts = {f"optimizer/spikes_{name}": count for name, count in self._spikes.taken_counts().items()}
        self.run.logger.write(self.event.step, {"epoch": epoch, **counts})

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Writes the file."""
        self._write()

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Writes the file: a checkpoint may be saved now."""
        self._write()

    def finalize(self, status: str) -> None:
        """Writes the file."""
        self._write()

    def _look(self, step: int, norm: float, loss: float) -> None:
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
