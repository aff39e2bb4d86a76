"""Generative models: flow matching, EDM and consistency models. Each objective has a loss and a sampler.

A network is any callable `network(x, t, condition)`. The files of this package have the parts of the losses as
functions.
"""

from jax_trainer.models.generative.networks import Frozen, Network, distilled
from jax_trainer.models.generative.objectives import (
    EDM,
    ConsistencyDistillation,
    ConsistencyDistillationConfig,
    ConsistencyTraining,
    ConsistencyTrainingConfig,
    EDMConfig,
    FlowMatching,
    FlowMatchingConfig,
    Objective,
    ObjectiveConfig,
    flow_matching_loss,
    flow_matching_samples,
)
from jax_trainer.models.generative.samplers import euler, heun

__all__ = [
    "EDM",
    "ConsistencyDistillation",
    "ConsistencyDistillationConfig",
    "ConsistencyTraining",
    "ConsistencyTrainingConfig",
    "EDMConfig",
    "FlowMatching",
    "FlowMatchingConfig",
    "Frozen",
    "Network",
    "Objective",
    "ObjectiveConfig",
    "distilled",
    "euler",
    "flow_matching_loss",
    "flow_matching_samples",
    "heun",
]
