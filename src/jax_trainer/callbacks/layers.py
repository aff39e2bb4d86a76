"""Monitors of the layers of a model: norms and histograms of their parameters, gradients and updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import AtLeast
from jax_trainer.core import Program, PyTree, with_gradients, with_layer_norms
from jax_trainer.diagnostics.leaves import float_leaves
from jax_trainer.engine import Every, StepEnd
from jax_trainer.sharding.placement import all_rows

PARAMS, GRADS = "param_histogram", "grad_histogram"


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
