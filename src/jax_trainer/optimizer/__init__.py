"""Optimizers, learning rate schedules and gradient transforms, each with its configuration.

An optimizer is built for a number of updates and is a plain optax transformation. Its state records the learning
rate, which `learning_rate(opt_state)` reads. `named`, imported when a file is loaded, has the other
optimizers of optax. Several optimizers by name (`build_optimizers`) update different parameters one after the other.
"""

from jax_trainer.optimizer import optimizer, scheduler, transforms
from jax_trainer.optimizer.alternating import AlternatingOptimizerConfig, build_optimizers
from jax_trainer.optimizer.groups import GroupConfig
from jax_trainer.optimizer.lr_finder import LRFindResult, find_learning_rate
from jax_trainer.optimizer.optimizer import (
    LBFGS,
    SGD,
    AdamW,
    AdamWConfig,
    BaseOptimizerConfig,
    Lamb,
    LambConfig,
    LBFGSConfig,
    OptimizerInterface,
    ScheduleFreeAdamW,
    ScheduleFreeAdamWConfig,
    ScheduleFreeSGD,
    ScheduleFreeSGDConfig,
    SGDConfig,
    checked_optimizer,
)
from jax_trainer.optimizer.reported import learning_rate, learning_rates
from jax_trainer.optimizer.scheduler import (
    BaseScheduleConfig,
    ConcatSchedule,
    ConcatScheduleConfig,
    ConstantSchedule,
    ConstantScheduleConfig,
    CosineSchedule,
    CosineScheduleConfig,
    ExponentialSchedule,
    ExponentialScheduleConfig,
    LinearSchedule,
    LinearScheduleConfig,
    ScheduleInterface,
    WarmupCosineDecaySchedule,
    WarmupCosineDecayScheduleConfig,
    loss_weights,
)
from jax_trainer.optimizer.transforms import (
    GradClipNorm,
    GradClipNormConfig,
    GradClipValue,
    GradClipValueConfig,
    GradientTransformConfig,
    GradientTransformInterface,
    WeightDecay,
    WeightDecayConfig,
)
from jax_trainer.optimizer.unfreezing import with_unfreezing

__all__ = [
    "LBFGS",
    "SGD",
    "AdamW",
    "AdamWConfig",
    "AlternatingOptimizerConfig",
    "BaseOptimizerConfig",
    "BaseScheduleConfig",
    "ConcatSchedule",
    "ConcatScheduleConfig",
    "ConstantSchedule",
    "ConstantScheduleConfig",
    "CosineSchedule",
    "CosineScheduleConfig",
    "ExponentialSchedule",
    "ExponentialScheduleConfig",
    "GradClipNorm",
    "GradClipNormConfig",
    "GradClipValue",
    "GradClipValueConfig",
    "GradientTransformConfig",
    "GradientTransformInterface",
    "GroupConfig",
    "LBFGSConfig",
    "LRFindResult",
    "Lamb",
    "LambConfig",
    "LinearSchedule",
    "LinearScheduleConfig",
    "OptimizerInterface",
    "SGDConfig",
    "ScheduleFreeAdamW",
    "ScheduleFreeAdamWConfig",
    "ScheduleFreeSGD",
    "ScheduleFreeSGDConfig",
    "ScheduleInterface",
    "WarmupCosineDecaySchedule",
    "WarmupCosineDecayScheduleConfig",
    "WeightDecay",
    "WeightDecayConfig",
    "build_optimizers",
    "checked_optimizer",
    "find_learning_rate",
    "learning_rate",
    "learning_rates",
    "loss_weights",
    "optimizer",
    "scheduler",
    "transforms",
    "with_unfreezing",
]
