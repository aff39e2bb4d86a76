"""Micro-batches whose number changes from epoch to epoch.

The number is static in a traced step: the program of another epoch is the same program, traced with another number.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from jax_trainer.core.by_epoch import checked_schedule
from jax_trainer.core.steps import GradFn, StepReport, TrainStep, accumulate
from jax_trainer.diagnostics.leaves import Batch, PyTree

Count = int | Mapping[int, int]  # one number, or several by the number of complete epochs

_COUNT: ContextVar[int | None] = ContextVar("micro-batches of the step being traced; None: as at first", default=None)


def schedule_of(count: Count) -> dict[int, int] | None:
    """The numbers of micro-batches by the number of complete epochs; None if there is only one."""
    return checked_schedule("accumulate", count) if isinstance(count, Mapping) else None


def most_of(count: Count) -> int:
    """The largest number of micro-batches.

    >>> most_of({0: 1, 5: 4})
    4
    """
    return max(count.values()) if isinstance(count, Mapping) else count


def accumulated(grad_fn: GradFn, count: Count) -> GradFn:
    """`accumulate` with one number of micro-batches, or that of the epoch for which the step is traced."""
    schedule = schedule_of(count)
    if schedule is None:
        return accumulate(grad_fn, count)  # type: ignore[arg-type]

    def of_epoch(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, step: jax.Array
    ) -> tuple[tuple[jax.Array, Any], PyTree]:
        now = _COUNT.get() or schedule[0]
        return accumulate(grad_fn, now)(params, model_state, batch, rng, step=step)

    return of_epoch


def with_micro_batches(train_step: TrainStep, count: int) -> TrainStep:
    """`train_step` of a program with a schedule, traced with `count` micro-batches."""

    def counted(state: Any, batch: Batch) -> tuple[Any, StepReport]:
        with _tracing(count):
            return train_step(state, batch)

    return counted


@contextmanager
def _tracing(count: int) -> Iterator[None]:
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)
