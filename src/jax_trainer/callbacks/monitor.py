"""Monitors of a run: the learning rate, the speed, the layers, and a summary of the model."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import AtLeast
from jax_trainer.core import Program, PyTree, with_gradients, with_layer_norms
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.diagnostics.leaves import float_leaves, leaves_by_path
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.engine import EpochEnd, Every, StepEnd, StepMetrics
from jax_trainer.optimizer.reported import METRIC, rates_in, with_learning_rate
from jax_trainer.sharding.placement import all_rows

LOG = logging.getLogger("jax_trainer")
PARAMS, GRADS = "param_histogram", "grad_histogram"
MODEL_FILE, PARAMS_FILE = "model.txt", "params.txt"


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
    kept: ClassVar[Mapping[str, Any]] = {"logged_epoch": int}

    def reset(self) -> None:
        self.logged_epoch = -1

    def wrap(self, program: Program) -> Program:
        # per step; it logs the rate of epochs itself
        return with_learning_rate(program, log_freq="step") if self.config.every_n_epochs else program

    def on_training_start(self) -> None:
        """Logs the initial rate, unless the run is resumed."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        self._log()

    def _log(self) -> None:
        epoch = self.event.epoch
        if epoch == self.logged_epoch:
            return
        is_first, self.logged_epoch = self.logged_epoch < 0, epoch
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
class ThroughputMonitorConfig(CallbackConfig):
    """When the speed is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class ThroughputMonitor(Callback):
    """Logs per epoch: examples and steps per second, seconds per step, and the fraction of time waiting for data.

    All are means over an epoch, at whose end the device has computed every step; evaluations do not count, and the
    first epoch includes compiling. There are no percentiles: metrics of steps arrive on the host some time after the
    steps, several at once, so the times of their arrival are not those of the steps.
    `throughput/data_wait_share` is the fraction of time that the device was idle because no batch was ready.
    """

    config: ThroughputMonitorConfig
    kept: ClassVar[Mapping[str, Any]] = {"epoch": int, "steps": int, "examples": Real}

    def reset(self) -> None:
        self.epoch = self.steps = 0  # the epoch that is being measured, 0: none; and its steps so far
        self.examples = 0.0

    def on_training_epoch_start(self, epoch: int) -> None:
        if epoch != self.epoch:  # otherwise the run was resumed inside it
            self.reset()
        self.epoch = epoch

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Counts the steps that are done."""
        self.steps += len(event.rows.words)
        self.examples += float(event.rows.format.default_weight.read(event.rows.words).sum())

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self.epoch = 0

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        event = self.event
        if not isinstance(event, EpochEnd) or not self.steps or event.seconds <= 0:
            return
        speed = {
            "examples_per_second": self.examples / event.seconds,
            "steps_per_second": self.steps / event.seconds,
            "step_time": event.seconds / self.steps,
            "data_wait_share": event.waited / event.seconds,
        }
        named = {f"throughput/{name}": value for name, value in speed.items()}
        self.run.logger.write(event.step, {"epoch": epoch, **named})


@dataclass
class NormMonitorConfig(CallbackConfig):
    """Which norms are logged.

    Args:
        every_n_epochs: not used: they are step metrics, logged as often as the loss.
        every_n_minutes: not used.
        params: the norm of the parameters of every layer, after the step.
        grads: the norm of their gradients, before clipping.
        updates: the norm of what the step adds to them; needs memory for one more copy of the parameters.
    """

    params: bool = True
    grads: bool = True
    updates: bool = True


@register
class NormMonitor(Callback):
    """Logs the norms of every layer: `param_norm/<layer>`, `grad_norm/<layer>` and `update_norm/<layer>`.

    A layer is a module with its arrays, such as a kernel and a bias. The compiled step computes the norms and reports
    them with its other metrics, so they cost little, and nothing waits for them.
    """

    config: NormMonitorConfig

    def wrap(self, program: Program) -> Program:
        config = self.config
        return with_layer_norms(program, params=config.params, grads=config.grads, updates=config.updates)


@dataclass
class HistogramMonitorConfig(CallbackConfig):
    """What histograms are drawn of, and when.

    Args:
        every_n_epochs: every n epochs: parameters at the end of the epoch, gradients in its first step; -1: every
            epoch, 0: not by epochs.
        every_n_minutes: not used.
        every_n_steps: also every n steps, of the gradients of the step after it; 0: not by steps. Dispatches of several
            steps end there.
        params: histograms of the parameters.
        grads: histograms of the gradients, before clipping. They are computed once more for it: in these steps only.
        max_values: of a larger array, about so many evenly spaced values are counted.
    """

    every_n_steps: Annotated[int, AtLeast(0)] = 0
    params: bool = True
    grads: bool = True
    max_values: Annotated[int, AtLeast(1)] = 65_536


@register
class HistogramMonitor(Callback):
    """Logs histograms of every array of parameters and gradients: `param_histogram/<path>`, `grad_histogram/<path>`.

    Steps in between cost nothing: arrays are copied to the host only when a histogram is due.
    """

    config: HistogramMonitorConfig
    kept: ClassVar[Mapping[str, Any]] = {"params_at": int, "grads_at": int}

    def reset(self) -> None:
        self.params_at = self.grads_at = -1  # the steps of the last histograms

    def wrap(self, program: Program) -> Program:
        return with_gradients(program, "the histograms of `HistogramMonitor`") if self.config.grads else program

    @property
    def sees_state_every(self) -> Every:
        """The steps at which it needs the parameters."""
        return Every(steps=self.config.every_n_steps if self.config.params else 0)

    @property
    def sees_grads_every(self) -> Every:
        """The steps and epochs at which it needs gradients."""
        if not self.config.grads:
            return Every()
        epochs = self.config.every_n_epochs
        return Every(steps=self.config.every_n_steps, epochs=1 if epochs == -1 else epochs)

    def on_step_end(self, event: StepEnd) -> None:
        """Logs at multiples of `every_n_steps`, and the gradients of the first step of an epoch."""
        every, before = self.config.every_n_steps, event.step - event.steps
        is_first = event.epoch_step == event.steps and self.config.due_at(event.epoch)
        if event.grads is not None and self.config.grads and (is_first or Every(steps=every).at_step(before)):
            self._log(GRADS, event.grads, before, self.grads_at)
            self.grads_at = before
        if every and event.step // every > before // every:
            self._log_params(event.step)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self._log_params(self.event.step)

    def _log_params(self, step: int) -> None:
        if self.config.params:
            self._log(PARAMS, self.state.params, step, self.params_at)
            self.params_at = step

    def _log(self, prefix: str, tree: PyTree, step: int, last: int) -> None:
        if step == last:
            return
        # in every process: an array may be sharded over them
        values = all_rows({path: sampled(leaf, self.config.max_values) for path, leaf in float_leaves(tree)})
        for path, array in values.items():
            self.run.logger.log_histogram(f"{prefix}/{path}", array, step)


def sampled(array: jax.Array, most: int) -> jax.Array:
    """About `most` evenly spaced values of a larger array, without rearranging one that is sharded.

    >>> import jax.numpy as jnp
    >>> sampled(jnp.arange(12).reshape(2, 6), 4).tolist()
    [[0, 3], [6, 9]]
    """
    size, slices = array.size, [slice(None)] * array.ndim
    for axis in sorted(range(array.ndim), key=lambda axis: -array.shape[axis]):
        length = array.shape[axis]
        step = min(-(-size // most), length)
        slices[axis], size = slice(None, None, step), size // length * -(-length // step)
    return array[tuple(slices)] if array.size > most else array


@dataclass
class ModelSummaryConfig(CallbackConfig):
    """Options of the model summary.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        show: also print it when training starts.
    """

    show: bool = False


@register
class ModelSummary(Callback):
    """Writes the layers to `model.txt` and the parameters to `params.txt`.

    Without a trainer, which logs it itself, it also logs their number as `param/num_model_params`, at step 0.
    """

    config: ModelSummaryConfig

    def on_training_start(self) -> None:
        params = self.state.params
        table = parameter_table(params)
        layers = self._layers() or table  # in all processes: the weights may be sharded over them
        if not self.is_primary:
            return
        write_atomically(self.run.folder / MODEL_FILE, f"{layers.rstrip()}\n")
        write_atomically(self.run.folder / PARAMS_FILE, f"{table}\n")
        if self.event.step == 0 and self.trainer is None:  # a trainer logs it itself
            self.run.logger.log_scalar("param/num_model_params", _count(params), 0)
        if self.config.show:
            safe_console().print(layers.rstrip(), markup=False, highlight=False, soft_wrap=True)

    def _layers(self) -> str:
        """The trainer's table of layers; "" if it has none."""
        if self.trainer is None:
            return ""
        try:
            return self.trainer.tabulate()
        except Exception as failure:  # a summary must not end a run
            LOG.warning(f"ModelSummary lists parameters only. {type(failure).__name__}: {failure}")
            return ""


def parameter_table(params: PyTree) -> str:
    """One line per array of parameters: path, shape, dtype, number; and the sum of all.

    >>> import numpy as np
    >>> print(parameter_table({"dense": {"bias": np.zeros(3), "kernel": np.zeros((2, 3))}}))
    parameter     shape   dtype    number
    dense.bias    [3]     float64       3
    dense.kernel  [2, 3]  float64       6
    total                               9
    """
    rows = [("parameter", "shape", "dtype", "number")]
    for path, leaf in leaves_by_path(params).items():
        rows.append((path, str(list(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"))
    rows.append(("total", "", "", f"{_count(params):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    *words, number = row
    left = (word.ljust(width) for word, width in zip(words, widths[:-1], strict=True))
    return "  ".join([*left, number.rjust(widths[-1])])


def _count(params: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
