"""Stochastic weight averaging: the average of the weights at the ends of the last epochs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import Above, AtLeast, AtMost
from jax_trainer.core import Program, TrainState
from jax_trainer.core.extra_args import FIXED_LEARNING_RATE, HYPERPARAMS
from jax_trainer.core.precision import cast_like
from jax_trainer.core.wrappers import SWA, with_weight_average
from jax_trainer.engine import Edit, EpochEnd
from jax_trainer.optimizer.reported import METRIC, rates_in, with_fixed_learning_rate

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
        hyperparams = {**state.extra[HYPERPARAMS], FIXED_LEARNING_RATE: rate.astype(jnp.float32)}
        average = {**state.extra[SWA], "rate": before.astype(jnp.float32)}
        return state.replace(extra={**state.extra, HYPERPARAMS: hyperparams, SWA: average})

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
