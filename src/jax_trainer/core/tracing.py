"""Sharding constraints for traced steps, which do not know their layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from jax_trainer.diagnostics.leaves import Batch, PyTree


class Placer(Protocol):
    """Adds sharding constraints to arrays of a traced step; implemented by `Layout`."""

    def constrain_params(self, tree: PyTree) -> PyTree:
        """`tree`, of the structure of the parameters, with their shardings."""
        ...

    def gather_params(self, tree: PyTree) -> PyTree:
        """`tree`, of the structure of the parameters, gathered along the batch axes."""
        ...

    def constrain_rows(self, batch: Batch, axis: int) -> Batch:
        """`batch`, sharded along `axis`."""
        ...


_CURRENT: ContextVar[Placer | None] = ContextVar("layout of the step being traced", default=None)


@contextmanager
def tracing_for(placer: Placer | None) -> Iterator[None]:
    """Traces steps inside the block for this layout."""
    token = _CURRENT.set(placer)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def like_params(tree: PyTree) -> PyTree:
    """`tree` with the shardings of the parameters: without a constraint, the compiler may replicate gradients."""
    placer = _CURRENT.get()
    return tree if placer is None else placer.constrain_params(tree)


def gathered(params: PyTree) -> PyTree:
    """`params` gathered along the batch axes: every example needs all of them."""
    placer = _CURRENT.get()
    return params if placer is None else placer.gather_params(params)


def split_rows(batch: Batch, axis: int = 0) -> Batch:
    """`batch` with its rows along `axis` sharded over the devices, if they divide evenly."""
    placer = _CURRENT.get()
    return batch if placer is None else placer.constrain_rows(batch, axis)
