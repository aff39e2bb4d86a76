"""Callbacks that change training as it goes: average weights, reduce the learning rate, unfreeze parameters."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.monitored import MetricWatcher, MonitoringConfig
from jax_trainer.config.settings import Above, AtLeast, AtMost, Below, IsRegex, Problem
from jax_trainer.core import Program, TrainState
from jax_trainer.core.by_epoch import value_in
from jax_trainer.core.precision import cast_like
from jax_trainer.core.state import hyperparameters_in, with_hyperparameters
from jax_trainer.core.wrappers import SWA, with_weight_average
from jax_trainer.diagnostics.leaves import parameter_paths
from jax_trainer.engine import Edit, EpochEnd
from jax_trainer.optimizer.reported import (
    FIXED_LEARNING_RATE,
    LEARNING_RATE,
    LEARNING_RATE_SCALE,
    METRIC,
    RATE,
    rates_in,
    with_fixed_learning_rate,
    with_learning_rate_scale,
)
from jax_trainer.optimizer.unfreezing import UNFREEZE_EPOCH, unfrozen_at, with_unfreezing

_ROUNDING = 1e-6  # relative error of a learning rate in float32
_LEAST = 1e-8  # a smaller change of the learning rate is left out, as by `eps` of torch
Change = Callable[[TrainState], TrainState]


@dataclass
class StochasticWeightAveragingConfig(CallbackConfig):
    """When weights are averaged, and at which learning rate.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        swa_epoch_start: the first epoch whose weights are averaged (epochs count from 1); a number below 1: that share
            of all epochs.
        swa_lrs: the learning rate while weights are averaged, instead of that of the optimizer or its schedule; null:
            that of the optimizer.
        annealing_epochs: epochs over which the learning rate changes to `swa_lrs`; 0: at once.
        annealing_strategy: cos: along a cosine; linear: along a line.
    """

    swa_epoch_start: Annotated[int, AtLeast(1)] | Annotated[float, Above(0), AtMost(1)] = 0.8
    swa_lrs: Annotated[float, Above(0)] | None = None
    annealing_epochs: Annotated[int, AtLeast(0)] = 10
    annealing_strategy: Literal["cos", "linear"] = "cos"

    def first_epoch(self, epochs: int) -> int:
        """The first epoch whose weights are averaged, of so many."""
        start = self.swa_epoch_start
        return max(1, int(epochs * start)) if isinstance(start, float) else start


@register
class StochasticWeightAveraging(Callback):
    """Averages the weights at the ends of the last epochs; at the end of training, the average becomes the weights.

    BatchNorm statistics are then those of the average, recomputed by a pass over the training data. Evaluations before
    use the weights of the optimizer; the last one, and the last checkpoint, have the average. It grows in
    `state.extra["swa"]` by an `Edit` at the end of each epoch, and so is part of every checkpoint and resumes exactly.
    If the run ends earlier, the weights stay those of the optimizer.
    """

    config: StochasticWeightAveragingConfig
    changes_training = True
    needs = ("end",)

    def reset(self) -> None:
        # kept, because each new function is compiled
        self._begin, self._grow, self._finish = _changes(self.config)

    def wrap(self, program: Program) -> Program:
        program = with_weight_average(program)
        return program if self.config.swa_lrs is None else with_fixed_learning_rate(program)

    def on_training_start(self) -> None:
        """Checks that the end of the run is known, and what the program has."""
        config, epochs, extra = self.config, self.run.epochs, self.state.extra
        if epochs is None:
            raise ValueError(
                "`StochasticWeightAveraging` needs the number of epochs, of which it averages the last: set "
                "`train_epochs`, or use data with a length."
            )
        if config.first_epoch(epochs) > epochs:
            raise ValueError(
                f"`swa_epoch_start` is {config.swa_epoch_start}, but the run ends after epoch {epochs}: nothing would "
                "be averaged. Start earlier."
            )
        if "ema" in extra:
            raise ValueError(
                "`StochasticWeightAveraging` and `ema` both average the weights, and evaluation would use the latter. "
                "Remove one of them."
            )
        if config.swa_lrs is not None and METRIC not in rates_in(self.state):
            raise ValueError(
                f"`swa_lrs` is {config.swa_lrs}, but the learning rate of this optimizer is not in its state, so it "
                "cannot be changed. Use `optax.inject_hyperparams(optax.sgd)(learning_rate=…)` or an optimizer of "
                "`jax_trainer.optimizer`, or leave out `swa_lrs`."
            )

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        config, last, event = self.config, self.run.epochs, self.event
        assert last is not None
        first = config.first_epoch(last)
        if epoch == last:
            count = last - first + 1
            reason = f"the weights are now the average of those of the last {count} epochs"
            return Edit(self._finish, reason=reason, recomputes_batch_stats=True)
        if isinstance(event, EpochEnd) and event.cut_off_after:  # the run ends in the middle of this epoch
            return None
        if epoch >= first:
            return Edit(self._grow, reason=f"epoch {epoch}", keeps_weights=True)
        if epoch == first - 1 and config.swa_lrs is not None and config.annealing_epochs == 0:
            return Edit(self._begin, reason=f"the learning rate is {config.swa_lrs} now", keeps_weights=True)
        return None


def _changes(config: StochasticWeightAveragingConfig) -> tuple[Change, Change, Change]:
    """The edits before the first averaged epoch, after each of them, and after the last."""

    def with_rate(state: TrainState, epochs: jax.Array | int) -> TrainState:
        """With the learning rate after so many epochs of averaging."""
        if config.swa_lrs is None:
            return state
        known = state.extra[SWA]["rate"]
        before = jnp.where(known > 0, known, rates_in(state)[METRIC])
        done = jnp.minimum(1.0, epochs / config.annealing_epochs) if config.annealing_epochs else jnp.float32(1)
        share = (1 - jnp.cos(math.pi * done)) / 2 if config.annealing_strategy == "cos" else done
        rate = config.swa_lrs * share + before * (1 - share)
        average = {**state.extra[SWA], "rate": before.astype(jnp.float32)}
        return with_hyperparameters(
            state.replace(extra={**state.extra, SWA: average}), {FIXED_LEARNING_RATE: rate.astype(jnp.float32)}
        )

    def set_swa_learning_rate(state: TrainState) -> TrainState:
        return with_rate(state, 0)

    def average_weights(state: TrainState) -> TrainState:
        swa = state.extra[SWA]
        count = swa["count"] + 1
        mean = lambda old, new: jnp.where(count == 1, new, old + (new - old) / count)
        average = jax.tree.map(lambda old, new: mean(old, new.astype(old.dtype)), swa["average"], state.params)
        state = state.replace(extra={**state.extra, SWA: {**swa, "average": average, "count": count}})
        return with_rate(state, count)

    def use_averaged_weights(state: TrainState) -> TrainState:
        state = average_weights(state)
        return state.replace(params=cast_like(state.extra[SWA]["average"], state.params))

    return set_swa_learning_rate, average_weights, use_averaged_weights


@dataclass
class ReduceLROnPlateauConfig(MonitoringConfig):
    """When the learning rate is reduced, and by how much.

    Args:
        factor: the learning rate is multiplied by it.
        patience: allowed number of validations in a row without improvement: one more reduces, as in torch.
        threshold: the minimum change that counts as an improvement, relative to the best value.
        cooldown: number of validations after a reduction during which none counts as one without improvement.
        min_lr: lower bound of the learning rate. Needs an optimizer whose learning rate is in its state.
        check_on_train_epoch_end: monitor the metrics of training epochs, such as train/loss, instead of validations.
    """

    factor: Annotated[float, Above(0), Below(1)] = 0.1
    patience: Annotated[int, AtLeast(0)] = 10
    threshold: Annotated[float, AtLeast(0)] = 1e-4
    cooldown: Annotated[int, AtLeast(0)] = 0
    min_lr: Annotated[float, AtLeast(0)] = 0.0
    check_on_train_epoch_end: bool = False

    def is_better(self, value: float, best: float) -> bool:
        """Whether `value` is an improvement over `best`."""
        # as torch's, also in its rounding
        return value > best * (1 + self.threshold) if self.best_mode == "max" else value < best * (1 - self.threshold)


@register
class ReduceLROnPlateau(MetricWatcher):
    """Multiplies the learning rate by `factor` when the monitored metric no longer improves.

    It reduces exactly when `torch.optim.lr_scheduler.ReduceLROnPlateau` with the same values does, except that an
    infinite value is never the best, and the first finite one always is (in torch not with `mode: min` and a
    `threshold` of at least 1). It works with every optimizer: one with a constant `learning_rate` in its state
    (`optax.inject_hyperparams`) gets a new value; the updates of others, also those with schedules, are scaled. Each
    reduction is an `Edit`: it is logged, is part of the next checkpoint, and resumes exactly.
    """

    config: ReduceLROnPlateauConfig
    changes_training = True

    kept: ClassVar[Mapping[str, Any]] = {**MetricWatcher.kept, "cooling": int}

    def reset(self) -> None:
        super().reset()  # a reduction also resets `waited`
        self.cooling = 0  # validations left of the cooldown

    def wrap(self, program: Program) -> Program:
        return with_learning_rate_scale(program) if self.config.every_n_epochs else program

    def on_training_start(self) -> None:
        """Checks that the learning rate of this optimizer can be reduced, and compared with `min_lr`."""
        if self.config.every_n_epochs and self.config.min_lr and self._rate() is None:
            raise ValueError(
                f"`min_lr` is {self.config.min_lr}, but the learning rate of this optimizer is not in its state, so it "
                "cannot be compared. Use `optax.inject_hyperparams(optax.adamw)(learning_rate=…)` or an optimizer of "
                "`jax_trainer.optimizer`, or leave out `min_lr`."
            )

    def check(self, value: float) -> Edit | None:
        """Reduces the learning rate on a plateau."""
        if not self._is_plateau(value):
            return None
        monitor, count = self.config.monitor, self.config.patience
        return self._reduced(
            f"`{monitor}` has not improved in {count + 1} validations in a row; {self.describe_best()}"
        )

    def _is_plateau(self, value: float) -> bool:
        """Updates the state with `value`; returns whether the learning rate is to be reduced."""
        if math.isfinite(value) and (self.best is None or self.config.is_better(value, self.best)):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.cooling > 0:
            self.cooling, self.waited = self.cooling - 1, 0
        if self.waited <= self.config.patience:
            return False
        self.waited, self.cooling = 0, self.config.cooldown
        return True

    def _reduced(self, reason: str) -> Edit | None:
        """The edit that reduces the learning rate; None if it is already at `min_lr`."""
        name = self._rate_name()
        before = float(hyperparameters_in(self.state)[name][0])
        after = before * self.config.factor
        if lowest := self.config.min_lr:
            rate = self._rate()
            if rate is None or rate <= lowest * (1 + _ROUNDING):
                return None
            after = max(after, before * lowest / rate)
            if rate - rate * after / before <= _LEAST:
                return None
        elif name == LEARNING_RATE and before - after <= _LEAST:
            return None
        return Edit(hyperparameters={name: after}, reason=reason)

    def _rate_name(self) -> str:
        """The hyperparameter to set: the learning rate if there is exactly one, otherwise the scale of updates."""
        rates = hyperparameters_in(self.state).get(LEARNING_RATE, ())
        return LEARNING_RATE if len(rates) == 1 else LEARNING_RATE_SCALE  # several would all get the same value

    def _rate(self) -> float | None:
        """The learning rate of the last update, with its scale, the lowest of several optimizers; None if unknown."""
        rates = rates_in(self.state)
        return min((float(rate) for name, rate in rates.items() if name.endswith(RATE)), default=None)


@dataclass
class UnfreezeConfig(CallbackConfig):
    """Which parameters train, and from when on.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        schedule: regular expressions of parameters, by the number of complete epochs after which they train; matched
            from the start of the dotted path. 0 is needed: something must train from the beginning.
        train_bn: update the running statistics of BatchNorms whose parameters are all frozen; otherwise they stay.
    """

    schedule: dict[Annotated[int, AtLeast(0)], Annotated[str, IsRegex()]] = field(default_factory=dict)
    train_bn: bool = False

    def problems(self) -> Any:
        """A schedule without a beginning."""
        if 0 not in self.schedule:
            found = f"`schedule` {self.schedule} has no parameters that train from the beginning"
            problem: Problem = ("schedule", f"{found}: add `0:`, as in {{0: 'head', 3: '.*'}}.")
            yield problem


@register
class Unfreeze(Callback):
    """Trains some parameters from the beginning, and unfreezes others after some epochs.

    A frozen parameter gets no update, its moments in the optimizer state stay as they are, and it does not count in the
    clipped norm. A BatchNorm all of whose parameters are frozen keeps its running statistics. When a parameter is
    unfrozen, the optimizer treats it as a new one, at the present learning rate. Each step is an `Edit` of one number
    in the state: it is logged, is part of the next checkpoint, resumes exactly, and compiles nothing.

    >>> unfreeze = Unfreeze(schedule={0: r"head\\..*", 3: r".*block[34].*", 6: ".*"})
    """

    config: UnfreezeConfig
    changes_training = True
    needs = ()

    def wrap(self, program: Program) -> Program:
        return with_unfreezing(program, self.config.schedule, train_bn=self.config.train_bn)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        event, schedule = self.event, self.config.schedule
        if epoch not in schedule or (isinstance(event, EpochEnd) and event.cut_off_after):
            return None
        paths = parameter_paths(self.state.params)
        new = [path for path, start in zip(paths, unfrozen_at(schedule, paths), strict=True) if start == epoch]
        reason = f"{len(new)} of {len(paths)} parameters are unfrozen by {value_in(schedule, epoch + 1)!r}: {new[0]}, …"
        return Edit(hyperparameters={UNFREEZE_EPOCH: epoch}, reason=reason)
