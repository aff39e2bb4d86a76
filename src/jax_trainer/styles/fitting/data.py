"""The data that `fit` is given: arrays become loaders, single examples batches, and batches inputs and targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import Batch, noting
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.datasets.foreign import as_arrays, is_array, is_arrays
from jax_trainer.datasets.peek import peeked

INPUTS = ("input", "inputs", "x", "image", "images", "features")
TARGETS = ("target", "targets", "y", "label", "labels")
SplitBatch = Callable[[Batch], tuple[Any, Any]]


class Inputs(NamedTuple):
    """Inputs without targets, apart from batches that have both."""

    value: Any


class FitData(NamedTuple):
    """Data as it can be trained on, its first batch, and whether it was cut out of arrays here."""

    data: Any
    example: Batch
    is_cut: bool


def as_fit_data(data: Any, name: str, split: SplitBatch, *, batch_size: int, shuffle: bool, seed: int) -> FitData:
    """`data` as something that gives batches: arrays are cut into them, in a new order every epoch if `shuffle`.

    Data that gives single examples, whose targets are numbers, is asked to batch them, where it has a method `batch`,
    as tf.data and Grain do.
    """
    if is_arrays(data):
        with noting(f"This is the {name!r} data."):
            loader = ArrayLoader(as_arrays(data, copy=False), batch_size, shuffle=shuffle, seed=seed)
        return FitData(loader, peeked(loader, name)[0], is_cut=True)
    example, data = peeked(data, name)
    if not _is_single(example, split):
        return FitData(data, example, is_cut=False)
    batch = getattr(data, "batch", None)
    if not callable(batch):
        raise DataError(
            f"The {name!r} data ({type(data).__name__}) gives single examples and not batches: a target is one number. "
            "Pass a loader that batches them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
        )
    example, data = peeked(batch(batch_size), name)
    return FitData(data, example, is_cut=False)


def _is_single(example: Batch, split: SplitBatch) -> bool:
    try:
        targets = split(example)[1]
    except DataError:  # it may be that nobody wants to split it
        return False
    return any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(targets))


def split_of(split_batch: SplitBatch | None) -> SplitBatch:
    """What takes a batch apart into inputs and targets."""
    if split_batch is None:
        return _split

    def split(batch: Batch) -> tuple[Any, Any]:
        match split_batch(batch):
            case (inputs, targets):
                return inputs, targets
            case other:
                raise TypeError(
                    f"`split_batch` returns inputs and targets; this one returned a {type(other).__name__}."
                )

    return split


def inputs_of(split_batch: SplitBatch | None) -> Callable[[Batch], Any]:
    """What finds the inputs in a batch, which need not have targets."""

    def inputs(batch: Batch) -> Any:
        if isinstance(batch, Inputs):
            return batch.value
        if is_array(batch):
            return batch
        return _found(batch, INPUTS, 0, "inputs") if split_batch is None else split_batch(batch)[0]

    return inputs


def _split(batch: Batch) -> tuple[Any, Any]:
    return _found(batch, INPUTS, 0, "inputs"), _found(batch, TARGETS, 1, "targets")


def _found(batch: Batch, names: tuple[str, ...], index: int, what: str) -> Any:
    entries = _entries(batch)
    if entries is None:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[index]
        kind = f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else "a single array"
        raise DataError(
            f"This batch is {kind}, so `fit` cannot tell which part are the {what}. {_ADVICE} All examples at once are "
            "a tuple of arrays, `fit(model, (x, y), …)`, and a list is one of batches."
        )
    matching = [name for name in names if name in entries]
    if len(matching) != 1:
        found = f"{' and '.join(matching)} may both be" if matching else "none of its entries is called as"
        raise DataError(
            f"This batch has {', '.join(map(str, entries)) or 'nothing'}: {found} the {what}, which are expected as "
            f"one of {', '.join(names)}. {_ADVICE}"
        )
    return entries[matching[0]]


_ADVICE = "Say what is what: `split_batch=lambda batch: (inputs, targets)`, or give batches as pairs `(x, y)`."


def _entries(batch: Batch) -> Mapping[str, Any] | None:
    """The entries of a batch by name, where they have names."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if hasattr(batch, "_asdict"):
        return batch._asdict()
    return None
