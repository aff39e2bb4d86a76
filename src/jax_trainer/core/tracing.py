"""What a step can ask of its layout while it is traced, without knowing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from jax_trainer.core.metrics import Batch, PyTree


class Placer(Protocol):
    """Tells the compiler where arrays of a traced step live; a `Layout` is one."""

    def constrain_params(self, tree: PyTree) -> PyTree:
        """`tree`, which looks like the parameters, laid out as they are."""
        ...

    def gather_params(self, tree: PyTree) -> PyTree:
        """`tree`, which looks like the parameters, as examples are computed with."""
        ...

    def constrain_rows(self, batch: Batch, axis: int) -> Batch:
        """`batch`, split along `axis`."""
        ...


_PRESENT: ContextVar[Placer | None] = ContextVar("layout of the step that is traced", default=None)


@contextmanager
def tracing_for(placer: Placer | None) -> Iterator[None]:
    """Meanwhile steps are traced for this layout."""
    token = _PRESENT.set(placer)
    try:
        yield
    finally:
        _PRESENT.reset(token)


def like_params(tree: PyTree) -> PyTree:
    """`tree` laid out as the parameters it mirrors: left to itself, the compiler may replicate gradients."""
    placer = _PRESENT.get()
    return tree if placer is None else placer.constrain_params(tree)


def gathered(params: PyTree) -> PyTree:
    """`params` whole along the axes that split a batch: every example needs all of them."""
    placer = _PRESENT.get()
    return params if placer is None else placer.gather_params(params)


def split_rows(batch: Batch, axis: int = 0) -> Batch:
    """`batch` with the rows along `axis` shared among the devices, where they divide evenly."""
    placer = _PRESENT.get()
    return batch if placer is None else placer.constrain_rows(batch, axis)
