"""What callbacks need of a program: metrics that its steps compute, and what they can change in its state."""

from collections.abc import Iterable
from typing import Any

from jax_trainer.callbacks.averaging import StochasticWeightAveragingConfig
from jax_trainer.callbacks.callback import Callback
from jax_trainer.callbacks.layers import HistogramMonitorConfig, NormMonitorConfig
from jax_trainer.callbacks.monitor import LearningRateMonitorConfig
from jax_trainer.callbacks.plateau import ReduceLROnPlateauConfig
from jax_trainer.callbacks.unfreeze import UnfreezeConfig
from jax_trainer.core import Program, with_gradients, with_layer_norms
from jax_trainer.core.wrappers import with_weight_average
from jax_trainer.optimizer.reported import with_fixed_learning_rate, with_learning_rate, with_learning_rate_scale
from jax_trainer.optimizer.unfreezing import with_unfreezing


def with_needs_of(callbacks: Iterable[Any], program: Program, *, log_rate: bool = False) -> Program:
    """`program` with what `callbacks`, or their configurations, need of it.

    Args:
        callbacks: `ReduceLROnPlateau` needs a scale of the learning rate, `LearningRateMonitor` its value in each step,
            `Unfreeze` frozen parameters, `StochasticWeightAveraging` an average, `NormMonitor` the norms of layers, and
            `HistogramMonitor` steps that report gradients.
        program: the program.
        log_rate: log the learning rate of windows of steps and of epochs in any case.
    """
    configs = [one.config if isinstance(one, Callback) else one for one in callbacks]
    if any(isinstance(one, ReduceLROnPlateauConfig) and one.every_n_epochs for one in configs):
        program = with_learning_rate_scale(program)
    for one in configs:
        if isinstance(one, UnfreezeConfig):
            program = with_unfreezing(program, one.schedule, train_bn=one.train_bn)
        if isinstance(one, StochasticWeightAveragingConfig):
            program = with_weight_average(program)
            program = program if one.swa_lrs is None else with_fixed_learning_rate(program)
    if log_rate:
        program = with_learning_rate(program)
    elif any(isinstance(one, LearningRateMonitorConfig) and one.every_n_epochs for one in configs):
        program = with_learning_rate(program, log_freq="step")  # the callback logs it per epoch
    for one in configs:
        if isinstance(one, NormMonitorConfig):
            program = with_layer_norms(program, params=one.params, grads=one.grads, updates=one.updates)
        if isinstance(one, HistogramMonitorConfig) and one.grads:
            program = with_gradients(program, "the histograms of `HistogramMonitor`")
    return program
