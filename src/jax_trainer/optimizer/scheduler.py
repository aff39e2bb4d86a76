"""Learning rate schedules, each with its configuration."""

from jax_trainer.optimizer.concat import ConcatSchedule, ConcatScheduleConfig
from jax_trainer.optimizer.elementary import (
    BaseScheduleConfig,
    ConstantSchedule,
    ConstantScheduleConfig,
    CosineSchedule,
    CosineScheduleConfig,
    ElementaryScheduleConfig,
    ExponentialSchedule,
    ExponentialScheduleConfig,
    LinearSchedule,
    LinearScheduleConfig,
    ScheduleInterface,
    WarmupCosineDecaySchedule,
    WarmupCosineDecayScheduleConfig,
)

__all__ = [
    "BaseScheduleConfig",
    "ConcatSchedule",
    "ConcatScheduleConfig",
    "ConstantSchedule",
    "ConstantScheduleConfig",
    "CosineSchedule",
    "CosineScheduleConfig",
    "ElementaryScheduleConfig",
    "ExponentialSchedule",
    "ExponentialScheduleConfig",
    "LinearSchedule",
    "LinearScheduleConfig",
    "ScheduleInterface",
    "WarmupCosineDecaySchedule",
    "WarmupCosineDecayScheduleConfig",
]
