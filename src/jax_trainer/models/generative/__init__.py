"""Generative models: flow matching, EDM and consistency models. Each objective has a loss and a sampler.

A network is any callable `network(x, t, condition)`. The losses and samplers are also available as functions.
"""

from jax_trainer.models.generative.consistency import (
    ConsistencyConfig,
    ConsistencyObjective,
    consistency_function,
    consistency_preconditioning,
    neighbours,
    pseudo_huber,
)
from jax_trainer.models.generative.consistency_distillation import (
    ConsistencyDistillation,
    ConsistencyDistillationConfig,
    consistency_distillation_loss,
    step_down,
)
from jax_trainer.models.generative.consistency_training import (
    ConsistencyTraining,
    ConsistencyTrainingConfig,
    consistency_training_loss,
    levels_at,
)
from jax_trainer.models.generative.edm import (
    EDM,
    EDMConfig,
    NoiseLevelsConfig,
    Preconditioning,
    denoiser,
    edm_loss,
    edm_samples,
    noise_levels,
    noise_removal,
    preconditioning,
)
from jax_trainer.models.generative.flow_matching import (
    FlowMatching,
    FlowMatchingConfig,
    flow_denoiser,
    flow_matching_loss,
    flow_matching_samples,
    flow_times,
)
from jax_trainer.models.generative.networks import (
    Condition,
    Denoiser,
    Distilled,
    Field,
    Frozen,
    Network,
    distilled,
    dropped,
    guided,
    null_condition,
)
from jax_trainer.models.generative.objective import Objective, ObjectiveConfig
from jax_trainer.models.generative.samplers import (
    Churn,
    churned_heun,
    consistency_samples,
    euler,
    euler_step,
    heun,
    heun_step,
)

__all__ = [
    "EDM",
    "Churn",
    "Condition",
    "ConsistencyConfig",
    "ConsistencyDistillation",
    "ConsistencyDistillationConfig",
    "ConsistencyObjective",
    "ConsistencyTraining",
    "ConsistencyTrainingConfig",
    "Denoiser",
    "Distilled",
    "EDMConfig",
    "Field",
    "FlowMatching",
    "FlowMatchingConfig",
    "Frozen",
    "Network",
    "NoiseLevelsConfig",
    "Objective",
    "ObjectiveConfig",
    "Preconditioning",
    "churned_heun",
    "consistency_distillation_loss",
    "consistency_function",
    "consistency_preconditioning",
    "consistency_samples",
    "consistency_training_loss",
    "denoiser",
    "distilled",
    "dropped",
    "edm_loss",
    "edm_samples",
    "euler",
    "euler_step",
    "flow_denoiser",
    "flow_matching_loss",
    "flow_matching_samples",
    "flow_times",
    "guided",
    "heun",
    "heun_step",
    "levels_at",
    "neighbours",
    "noise_levels",
    "noise_removal",
    "null_condition",
    "preconditioning",
    "pseudo_huber",
    "step_down",
]
