"""Optimizers that need more than the gradients: `LBFGS`, and those without a schedule."""

from dataclasses import dataclass
from typing import Annotated, Literal

import optax
from compoconf import register
from optax import contrib

from jax_trainer.config.settings import Above, AtLeast, AtMost, Below
from jax_trainer.optimizer.optimizer import BaseOptimizerConfig, IsFloatType, OptaxOptimizer, OptimizerInterface, Rate
from jax_trainer.optimizer.scheduler import ScheduleInterface

Decay = Annotated[float, AtLeast(0), Below(1)]
Positive = Annotated[float, Above(0)]


@dataclass
class LBFGSConfig(BaseOptimizerConfig):
    """Configuration of `LBFGS`.

    Args:
        learning_rate: a factor for the direction in which the line search looks: a number or a schedule.
        memory_size: number of past updates from which the inverse Hessian is approximated.
        scale_init_precond: scale the initial approximation by the last gradients.
        max_linesearch_steps: maximum number of evaluations of the loss and its gradient per update.
        initial_guess_strategy: the first step size of a line search: one (1), or keep (that of the last one).
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1.0
    memory_size: Annotated[int, AtLeast(1)] = 10
    scale_init_precond: bool = True
    max_linesearch_steps: Annotated[int, AtLeast(1)] = 20
    initial_guess_strategy: Literal["one", "keep"] = "one"


@register
class LBFGS(OptimizerInterface):
    """L-BFGS with a zoom line search, for losses without noise: every batch must be the whole data set."""

    config: LBFGSConfig

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        config = self.config
        guess = config.initial_guess_strategy
        linesearch = optax.scale_by_zoom_linesearch(config.max_linesearch_steps, initial_guess_strategy=guess)
        return optax.lbfgs(learning_rate, config.memory_size, config.scale_init_precond, linesearch)


@dataclass
class _ScheduleFreeConfig(BaseOptimizerConfig):
    """Keys of schedule-free optimizers.

    Args:
        learning_rate: a number, or a schedule with a warmup: no decay is needed.
        b1: weight of the average in the parameters at which gradients are computed.
        weight_decay: strength of the weight decay of all parameters.
        weight_lr_power: exponent of the learning rate in the weights of the average.
        state_dtype: dtype of the sequence that is averaged; null: that of the parameters.
    """

    b1: Annotated[float, Above(0), AtMost(1)] = 0.9
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    weight_lr_power: Annotated[float, AtLeast(0)] = 2.0
    state_dtype: Annotated[str, IsFloatType()] | None = None


@dataclass
class ScheduleFreeAdamWConfig(_ScheduleFreeConfig):
    """Configuration of `ScheduleFreeAdamW`.

    Args:
        b2: decay rate of the second moment.
        eps: added to the denominator for numerical stability.
    """

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 2.5e-3
    b2: Decay = 0.999
    eps: Annotated[float, AtLeast(0)] = 1e-8


@register
class ScheduleFreeAdamW(OptaxOptimizer):
    """AdamW without a schedule: evaluation uses an average of the weights, which replaces a decay of the rate."""

    config: ScheduleFreeAdamWConfig
    factory = staticmethod(contrib.schedule_free_adamw)


@dataclass
class ScheduleFreeSGDConfig(_ScheduleFreeConfig):
    """Configuration of `ScheduleFreeSGD`."""

    learning_rate: Annotated[float, AtLeast(0)] | ScheduleInterface.cfgtype = 1.0


@register
class ScheduleFreeSGD(OptaxOptimizer):
    """SGD without a schedule: evaluation uses an average of the weights, which replaces a decay of the rate."""

    config: ScheduleFreeSGDConfig
    factory = staticmethod(contrib.schedule_free_sgd)
