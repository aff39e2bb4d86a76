"""The data passed to `fit`: converts arrays to loaders, batches single examples, and splits inputs from targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets import ArrayLoader, DataError, DataSource
from jax_trainer.datasets.batch import INPUTS, TARGETS
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.foreign import as_arrays, is_array, is_arrays
from jax_trainer.diagnostics.user_frame import noting

SplitBatch = Callable[[Batch], tuple[Any, Any]]


class Inputs(NamedTuple):
    """A batch of inputs without targets."""

    value: Any


@flax.struct.dataclass
class Masked:
    """A batch of an evaluation, and which of its examples count."""

    batch: Any
    mask: Any

    @property
    def count(self) -> Any:
        """The number of examples that count."""
        return self.mask.sum()


@flax.struct.dataclass
class Weighted:
    """A batch to train on, and the weight of each of its examples in the loss."""

    batch: Any
    weight: Any


def as_yielded(batch: Batch) -> Batch:
    """The batch that the data yields, without what `fit` adds to it."""
    return batch.batch if isinstance(batch, Masked | Weighted) else batch


class FitData(NamedTuple):
    """Data to train on, its first batch, and whether `fit` made the batches from arrays."""

    data: Any
    example: Batch
    from_arrays: bool


def as_fit_data(
    data: Any, name: str, split: SplitBatch, *, batch_size: int | Mapping[int, int], shuffle: bool, seed: int
) -> FitData:
    """Returns `data` as a source of batches; arrays are batched, and reshuffled every epoch if `shuffle`.

    Data that yields single examples (their targets are scalars) is batched by its method `batch`, if it has one, as
    tf.data and Grain do.
    """
    if is_arrays(data):
        with noting(f"This is the {name!r} data."):
            loader = ArrayLoader(as_arrays(data, copy=False), batch_size, shuffle=shuffle, seed=seed)
        return FitData(loader, peeked(loader, name)[0], from_arrays=True)
    if isinstance(batch_size, Mapping):
        raise DataError(
            f"`batch_size` is {dict(batch_size)}, by epoch, but the {name!r} data ({type(data).__name__}) has its own "
            f"batches. Pass arrays, or give it to a loader: `ArrayLoader(arrays, {dict(batch_size)})`."
        )
    example, data = peeked(data, name)
    if not _is_single(example, split):
        return FitData(data, example, from_arrays=False)
    batch = getattr(data, "batch", None)
    if not callable(batch):
        raise DataError(
            f"The {name!r} data ({type(data).__name__}) yields single examples, not batches: a target is a scalar. "
            "Pass a loader that batches them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
        )
    example, data = peeked(batch(batch_size), name)
    return FitData(data, example, from_arrays=False)


def with_sample_weight(data: Any, sample_weight: Any) -> Weighted:
    """The arrays of all examples, with these weights."""
    if not isinstance(data, tuple | Mapping) or not is_arrays(data):
        raise DataError(
            f"`sample_weight` needs the complete dataset as arrays, `(x, y)` or a dict, got a {type(data).__name__}. "
            "Pass arrays; or yield batches with weights, `SupervisedBatch.of(x, y, mask=weights)`, whose loss is "
            "divided by the sum of the weights."
        )
    arrays, weight = as_arrays((data, sample_weight), copy=False)
    shape, lengths = np.shape(weight), {np.shape(leaf)[:1] for leaf in jax.tree.leaves(arrays)}
    if {shape} != lengths:
        raise DataError(f"`sample_weight` has shape {shape}. Pass one weight per example: {sorted(lengths)}.")
    return Weighted(arrays, np.asarray(weight, np.float32))


def as_eval_data(data: Any, name: str, split: SplitBatch, *, batch_size: int, is_repeated: bool) -> Any:
    """Returns `data` as a source of batches to evaluate on, once or repeatedly."""
    if is_arrays(data) or callable(getattr(data, "batch", None)):
        return as_fit_data(data, name, split, batch_size=batch_size, shuffle=False, seed=0).data
    if DataSource(data, name, may_be_empty=True).is_one_shot and is_repeated:
        raise DataError(
            f"`test_ds` is an iterator that can be used only once ({type(data).__name__}), but the run evaluates "
            "several times. Pass a list, a loader, or a function that returns a new iterator."
        )
    return data


def _is_single(example: Batch, split: SplitBatch) -> bool:
    try:
        targets = split(example)[1]
    except DataError:  # a loss that takes the batch need not split it
        return False
    return any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(targets))


def split_of(split_batch: SplitBatch | None) -> SplitBatch:
    """Returns the function that splits a batch into inputs and targets."""
    if split_batch is None:
        return _split

    def split(batch: Batch) -> tuple[Any, Any]:
        match split_batch(batch):
            case tuple((inputs, targets)) | list((inputs, targets)):  # since numpy 2.5, an array is a sequence
                return inputs, targets
            case other:
                raise TypeError(f"`split_batch` must return `(inputs, targets)`, got a {type(other).__name__}.")

    return split


def inputs_of(split_batch: SplitBatch | None) -> Callable[[Batch], Any]:
    """Returns the function that extracts the inputs from a batch, with or without targets."""

    def inputs(batch: Batch) -> Any:
        if isinstance(batch, Inputs):
            return batch.value
        batch = as_yielded(batch)
        if is_array(batch):
            return batch
        return _find(batch, INPUTS, 0, "inputs") if split_batch is None else split_batch(batch)[0]

    return inputs


def _split(batch: Batch) -> tuple[Any, Any]:
    return _find(batch, INPUTS, 0, "inputs"), _find(batch, TARGETS, 1, "targets")


def _find(batch: Batch, names: tuple[str, ...], index: int, what: str) -> Any:
    entries = _entries(batch)
    if entries is None:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[index]
        kind = f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else "a single array"
        raise DataError(
            f"The batch is {kind}, so `fit` cannot find the {what}. {_HINT} For a complete dataset as arrays, use a "
            "tuple, `fit(model, (x, y), …)`; a list is read as a list of batches."
        )
    matching = [name for name in names if name in entries]
    if len(matching) != 1:
        found = f"{' and '.join(matching)} are both candidates for" if matching else "no entry is named like"
        raise DataError(
            f"The batch has the entries {', '.join(map(str, entries)) or 'none'}: {found} the {what}, expected as one "
            f"of {', '.join(names)}. {_HINT}"
        )
    return entries[matching[0]]


_HINT = "Pass `split_batch=lambda batch: (inputs, targets)`, or batches that are pairs `(x, y)`."


def _entries(batch: Batch) -> Mapping[str, Any] | None:
    """The entries of a batch by name; None if they have no names."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if hasattr(batch, "_asdict"):
        return batch._asdict()
    return None
