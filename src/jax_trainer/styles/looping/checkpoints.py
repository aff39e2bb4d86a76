"""`Checkpoint` and `Summary`: what a `TrainLoop` yields, and a checkpoint with evaluation metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core import PyTree, TrainState
from jax_trainer.core.steps import global_norm
from jax_trainer.engine import LoopState

Metrics = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of training after a step. Later steps do not change it.

    Args:
        model_params: the trained parameters.
        model_state: the other variables of the model, such as batch statistics.
        optimizer_state: the state of the optax optimizer.
        grads: the gradients of this step.
        loss: the loss of this step.
        n_completed_steps: number of steps since the previous checkpoint.
        elapsed_time: duration of these steps in seconds.
        step: total number of steps.
        rng: key data of the loop's root key.
        extra: further state of the loop.
        loop_state: position in the data, to resume from.
    """

    model_params: PyTree = field(repr=False)
    model_state: PyTree = field(repr=False)
    optimizer_state: PyTree = field(repr=False)
    grads: PyTree = field(repr=False)
    loss: float
    n_completed_steps: int
    elapsed_time: float
    step: int
    rng: Any = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    loop_state: LoopState | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Summary(Checkpoint):
    """A checkpoint with metrics, in groups such as "train" and "eval"."""

    metrics: Mapping[str, Metrics] = field(default_factory=dict)


def summarised(checkpoint: Checkpoint, group: str, metrics: Metrics) -> Summary:
    """`checkpoint` with these metrics under `group`, besides those that it has."""
    own = {item.name: getattr(checkpoint, item.name) for item in fields(Checkpoint)}
    return Summary(**own, metrics={**metrics_of(checkpoint), group: dict(metrics)})


def metrics_of(checkpoint: Checkpoint) -> dict[str, Metrics]:
    """The metrics of a summary by group; of a checkpoint, those of training."""
    if isinstance(checkpoint, Summary):
        return dict(checkpoint.metrics)
    return {"train": train_metrics(checkpoint)}


def by_full_name(metrics: Mapping[str, Metrics]) -> dict[str, float]:
    """The metrics of all groups, each under "group/label".

    >>> by_full_name({"train": {"loss": 0.5}, "eval": {"acc": 0.75}})
    {'train/loss': 0.5, 'eval/acc': 0.75}
    """
    return {f"{group}/{label}": value for group, named in metrics.items() for label, value in named.items()}


def train_metrics(checkpoint: Checkpoint) -> dict[str, float]:
    """The training metrics of a checkpoint."""
    return {
        "seconds_per_step": checkpoint.elapsed_time / max(1, checkpoint.n_completed_steps),
        "gradients_l2norm": float(global_norm(checkpoint.grads)),
        "weights_l2norm": float(global_norm(checkpoint.model_params)),
        "loss": float(checkpoint.loss),
    }


def state_of(checkpoint: Checkpoint) -> TrainState:
    """The training state of a checkpoint, to resume from."""
    if checkpoint.rng is None:
        raise ValueError(
            f"The checkpoint of step {checkpoint.step} has no `rng`: it was not created by a `TrainLoop`, and cannot "
            "be resumed exactly. Use the checkpoints of the loop, or set `rng`, `extra` and `loop_state`."
        )
    return TrainState(
        step=jnp.asarray(checkpoint.step, jnp.int32),
        params=checkpoint.model_params,
        model_state=checkpoint.model_state,
        opt_state=checkpoint.optimizer_state,
        rng=jnp.asarray(checkpoint.rng),
        extra=dict(checkpoint.extra),
    )


def number_of_weights(params: PyTree) -> tuple[int, int]:
    """The number of parameters in `params`, and their size in bytes."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
