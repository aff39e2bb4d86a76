"""What the step that is being traced is traced for, which neither its arguments nor its functions know."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.sharding.layout import Layout


@dataclass(frozen=True)
class Tracing:
    """What a step is traced for.

    Args:
        placer: the layout of its arrays; None: one device.
        micro_batches: their number, if that changes from epoch to epoch; None: as at first.
        loss_scale: of float16; None: the loss is not scaled.
        wraps: transformations around the optimizer (`Around`), the innermost first.
        is_recomputed: whether a module that is computed again in the backward pass is being traced.
        names_modules: whether every module computes in a `jax.named_scope`.
        notes: what the step has done, for each `tracing` around it.
    """

    placer: Layout | None = None
    micro_batches: int | None = None
    loss_scale: jax.Array | None = None
    wraps: tuple[Any, ...] = ()
    is_recomputed: bool = False
    names_modules: bool = False
    notes: tuple[set[str], ...] = ()


_CURRENT: ContextVar[Tracing] = ContextVar("of the step being traced", default=Tracing())  # noqa: B039 - frozen


def current() -> Tracing:
    """What the step that is being traced is traced for."""
    return _CURRENT.get()


@contextmanager
def tracing(**changes: Any) -> Iterator[set[str]]:
    """Traces steps inside the block for other fields of `Tracing`; yields what they `note`."""
    before, notes = _CURRENT.get(), set[str]()
    token = _CURRENT.set(replace(before, notes=(*before.notes, notes), **changes))
    try:
        yield notes
    finally:
        _CURRENT.reset(token)


def note(what: str) -> None:
    """Tells every `tracing` around the step that it does this."""
    for notes in _CURRENT.get().notes:
        notes.add(what)


def like_params(tree: PyTree) -> PyTree:
    """`tree` with the shardings of the parameters: without a constraint, the compiler may replicate gradients."""
    placer = current().placer
    return tree if placer is None else placer.constrain_params(tree)


def gathered(params: PyTree) -> PyTree:
    """`params` gathered along the batch axes: every example needs all of them."""
    placer = current().placer
    return params if placer is None else placer.gather_params(params)


def split_rows(batch: Batch, axis: int = 0) -> Batch:
    """`batch` with its rows along `axis` sharded over the devices, if they divide evenly."""
    placer = current().placer
    return batch if placer is None else placer.constrain_rows(batch, axis)
