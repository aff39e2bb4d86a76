"""`Checkpoint` and `Summary`: what a `TrainLoop` yields, with evaluation metrics; and what reports them."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from jax_trainer.core import PyTree, TrainState
from jax_trainer.core.steps import global_norm
from jax_trainer.diagnostics.output import OUT
from jax_trainer.engine import LoopState
from jax_trainer.logger import TensorboardConfig, TensorboardToolLogger
from jax_trainer.runs import Recorded

Metrics = Mapping[str, float]
AnyCheckpoint = TypeVar("AnyCheckpoint", bound="Checkpoint")
_GROUP, _LABEL = len("train"), len("seconds_per_step")  # minimum column widths of a report


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
        frozen: the arrays that no step changes: the base of LoRA, whose adapters are `model_params`.
        recorded: what the loop computes, by which a loop that resumes it is compared.
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
    frozen: PyTree = field(default_factory=dict, repr=False)
    recorded: Recorded | None = field(default=None, repr=False)


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
    train = {
        "seconds_per_step": checkpoint.elapsed_time / max(1, checkpoint.n_completed_steps),
        "gradients_l2norm": float(global_norm(checkpoint.grads)),
        "weights_l2norm": float(global_norm(checkpoint.model_params)),
        "loss": float(checkpoint.loss),
    }
    return {"train": train}


def by_full_name(checkpoint: Checkpoint) -> dict[str, float]:
    """The metrics of all groups, each under "group/label"."""
    groups = metrics_of(checkpoint).items()
    return {f"{group}/{label}": float(value) for group, named in groups for label, value in named.items()}


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
        frozen=checkpoint.frozen,
    )


# processors of checkpoints


def serial(*processors: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `processors` in order, each with the result of the previous one.

    A processor that returns None passes its argument on.

    >>> seen = []
    >>> serial(lambda x: x + 1, seen.append, lambda x: 10 * x)(1), seen
    (20, [2])
    """
    for number, processor in enumerate(processors):
        if not callable(processor):
            raise TypeError(f"Processor {number} is a {type(processor).__name__}, which cannot be called.")

    def process(checkpoint: Any) -> Any:
        for processor in processors:
            returned = processor(checkpoint)
            checkpoint = checkpoint if returned is None else returned
        return checkpoint

    return process


class SummaryLogger:
    """Prints a report of every checkpoint or summary that it is called with; returns it.

    >>> logger = SummaryLogger()
    """

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Prints the report of `summary`."""
        metrics, head = metrics_of(summary), f"Step {summary.step:6d}:"
        group_width = max([_GROUP, *map(len, metrics)])
        label_width = max([_LABEL, *(len(label) for named in metrics.values() for label in named)])
        lines = [f"{head} Ran {summary.n_completed_steps} train steps in {summary.elapsed_time:.2f} seconds"]
        for group, named in metrics.items():
            start = f"{head} {group:<{group_width}}"
            lines += [f"{start} {label:>{label_width}} | {value:.8f}" for label, value in named.items()]
        OUT.write("\n" + "".join(f"{line}\n" for line in lines))
        return summary


class SummaryWriter:
    """Writes the metrics of every checkpoint or summary that it is called with to TensorBoard; returns it.

    All metrics go to one file, as "group/label", and are on disk when it returns. Needs the extra `tensorboard`.
    """

    def __init__(self, output_dir: str | Path) -> None:
        TensorboardToolLogger.require()
        self._folder = Path(output_dir).absolute()
        self._tool: TensorboardToolLogger | None = None

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Writes the metrics of `summary`."""
        if self._tool is None:
            self._tool = TensorboardToolLogger(TensorboardConfig(), self._folder)
            self._close = weakref.finalize(self, self._tool.close, "completed")
        self._tool.write(summary.step, by_full_name(summary))
        self._tool.flush()
        return summary

    def close(self) -> None:
        """Closes the file; later metrics go to a new one."""
        if self._tool is not None:
            self._close()
            self._tool = None
