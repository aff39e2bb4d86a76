"""`EvalLoop`: evaluates checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core import (
    Batch,
    FlatState,
    Metrics,
    Program,
    TrainState,
    as_metrics,
    batch_weight,
    check_call,
    compile_program,
    stream,
)
from jax_trainer.core.loss_shape import check_pairing
from jax_trainer.core.rng import key_data
from jax_trainer.datasets import DataSource
from jax_trainer.engine import EvalEnd, Event, Plan, eval_events
from jax_trainer.styles.looping.calls import Collections, ModelCall, split
from jax_trainer.styles.looping.checkpoints import Checkpoint, Summary, summarised
from jax_trainer.suggestions import checks_keywords


@checks_keywords
@dataclass(frozen=True, eq=False)
class EvalTask:
    """The metrics to compute, and the data.

    Args:
        apply: the `apply` of a linen module, or a function `(variables, *inputs)`.
        metrics: functions `(*outputs, *targets)` by label; their values are averaged over all examples, and those of a
            `{"value": sum, "count": n}` over all counted items.
        data: yields pairs of inputs and targets, see `TrainTask`.
    """

    apply: Callable[..., Any] = field(repr=False)
    metrics: Mapping[str, Callable[..., Any]]
    data: Any = field(repr=False)


@checks_keywords
class EvalLoop:
    """Evaluates the checkpoints that it is called with; returns them with metrics, as summaries.

    Iterator data continues where the previous evaluation stopped; a list or a loader starts over.

    Args:
        task: the metrics and the data.
        rnkey: random key of the evaluations, the same for each of them.
        n_steps: number of batches per evaluation.
        collections: names of the model's random streams, under "apply".
        group: the group of the metrics in the summary.
    """

    def __init__(
        self,
        task: EvalTask,
        rnkey: jax.Array | None = None,
        n_steps: int = 1,
        collections: Mapping[str, Sequence[str]] | None = None,
        *,
        group: str = "eval",
    ) -> None:
        if not isinstance(task.metrics, Mapping) or not all(map(callable, task.metrics.values())):
            raise TypeError(f"`EvalTask(metrics=…)` must be a dict of functions by label, got {task.metrics!r}.")
        if not task.metrics:
            raise ValueError("`EvalTask(metrics=…)` is empty. Pass at least one metric function.")
        self._key, self._group, self._rounds = rnkey, group, 0
        self._plan = Plan(max_steps=0, eval_batches=n_steps)
        self._data_source = DataSource(task.data, group)
        self._program = compile_program(_program(task, Collections.of(collections).apply))

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with its evaluation and training metrics."""
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"An EvalLoop must be called with a checkpoint of a TrainLoop, got a {type(checkpoint).__name__}."
            )
        self._rounds += 1
        at = Event(checkpoint.step, self._rounds, FlatState.of(self._state(checkpoint)))
        # closed here: an exception raised while Python collects a generator, such as Ctrl-C, is lost
        with closing(eval_events(self._program, at, {self._group: self._data_source}, self._plan)) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, EvalEnd):
                    found = {label: float(value) for label, value in event.metrics.items()}
                    return summarised(checkpoint, self._group, found)
        raise self._data_source.exhausted_error(self._rounds)

    def _state(self, checkpoint: Checkpoint) -> TrainState:
        """The parts of the state that an evaluation needs; all others are constant."""
        key = jax.random.key(0) if self._key is None else self._key
        step, params, model_state = jnp.zeros((), jnp.int32), checkpoint.model_params, checkpoint.model_state
        return TrainState(step, params, model_state, opt_state=(), rng=key_data(key), extra={})


def _measured(value: Any) -> Any:
    """The mean over the batch of what a metric returned; a dict with `value` and `count` is already reduced."""
    return value if isinstance(value, Mapping) else jnp.mean(value)


def _program(task: EvalTask, names: tuple[str, ...]) -> Program:
    call = ModelCall(task.apply, names)

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        inputs, targets = split(batch)
        outputs, _ = call(state.params, state.model_state, inputs, stream(state.key, "eval"), train=False)
        for label, metric in task.metrics.items():
            check_call(metric, f"metrics[{label!r}]", *("outputs" for _ in outputs), *("targets" for _ in targets))
            check_pairing(lambda a, b, of=metric: of(*a, *b), outputs, targets, what=f"The metric {label!r}")
        measured = {label: _measured(metric(*outputs, *targets)) for label, metric in task.metrics.items()}
        return as_metrics(measured, batch_weight(batch))

    def never(*_: Any) -> Any:
        raise NotImplementedError("This program can only evaluate.")

    return Program(init=never, train_step=never, eval_step=eval_step)
