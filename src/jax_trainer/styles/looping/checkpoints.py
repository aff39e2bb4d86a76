"""`Checkpoint` and `Summary`: what a training loop hands out, and what an evaluation adds to it."""

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
    """The state of training after some step. It stays as it is, whatever the loop does afterwards.

    Args:
        model_params: what is trained.
        model_state: what the model carries besides: batch statistics, for example.
        optimizer_state: of optax.
        grads: the gradients of this step.
        loss: of this step.
        n_completed_steps: the steps since the checkpoint before this one.
        elapsed_time: seconds that these took.
        step: how many steps were taken in all.
        rng: the root key of the loop, as its words.
        extra: what else the loop keeps.
        standing: where in the data the loop stands.
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
    """The metrics of a summary; of a checkpoint alone, what training tells."""
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
    """What training tells of its last steps."""
    return {
        "seconds_per_step": checkpoint.elapsed_time / max(1, checkpoint.n_completed_steps),
        "gradients_l2norm": float(global_norm(checkpoint.grads)),
        "weights_l2norm": float(global_norm(checkpoint.model_params)),
        "loss": float(checkpoint.loss),
    }


def state_of(checkpoint: Checkpoint) -> TrainState:
    """The state that a loop goes on from."""
    if checkpoint.rng is None:
        raise ValueError(
            f"The checkpoint of step {checkpoint.step} was not made by a `TrainLoop`: it has no `rng`, so nothing can "
            "go on from it exactly. Pass on the checkpoints of the loop, or give it `rng`, `extra` and `standing`."
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
    """How many numbers `params` are, and in how many bytes."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
