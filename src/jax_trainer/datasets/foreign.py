"""Converts batches of other libraries to arrays: torch and TensorFlow tensors, lists, mappings, plain dataclasses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.diagnostics.leaves import leaf_path

# libraries that allocate new arrays for every batch; other loaders may reuse a buffer
FRESH = ("torch", "torchdata", "tensorflow", "grain")


class DataError(ValueError):
    """The data cannot be used. The message names the data and the fix."""


def makes_fresh_arrays(source: Any) -> bool:
    """Whether `source` is known never to reuse the memory of arrays that it has returned."""
    return isinstance(source, list | tuple) or type(source).__module__.partition(".")[0] in FRESH


def as_arrays(batch: Any, *, copy: bool) -> Batch:
    """`batch` with every entry as an array; `copy` always copies, otherwise only where necessary.

    >>> as_arrays({"x": [[1, 2], [3, 4]]}, copy=False)["x"].shape
    (2, 2)
    """
    kind = type(batch)
    if kind is np.ndarray:  # first what is in almost every batch: the other checks take longer than a tiny copy
        return batch.copy() if copy else batch
    if kind is tuple:
        return tuple([as_arrays(value, copy=copy) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        register_as_pytree(batch)
        values = {f.name: as_arrays(getattr(batch, f.name), copy=copy) for f in _data_fields(batch)}
        return dataclasses.replace(batch, **values)
    if isinstance(batch, Mapping):
        return {name: as_arrays(value, copy=copy) for name, value in batch.items()}
    if _is_numbers(batch):
        try:
            return np.asarray(batch)
        except ValueError as error:
            raise DataError(f"A list is ragged: pad its parts to one length. numpy: {error}") from None
    if isinstance(batch, list | tuple):
        parts = [as_arrays(value, copy=copy) for value in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    return batch if batch is None else _as_array(batch, copy=copy)


def is_arrays(data: Any) -> bool:
    """Whether `data` holds all examples: an array, or a tuple, dict or dataclass of arrays, and not batches."""
    is_record = dataclasses.is_dataclass(data) and not isinstance(data, type) and not hasattr(data, "__iter__")
    if isinstance(data, tuple | Mapping):
        parts = list(data.values() if isinstance(data, Mapping) else data)
        if any(map(is_array, parts)) and all(is_array(part) or _is_numbers(part) for part in parts):
            return True  # lists of numbers among them are arrays, too
    if isinstance(data, tuple | Mapping) or is_record:
        leaves = jax.tree.leaves(register_as_pytree(data))
        return bool(leaves) and all(map(is_array, leaves))
    return is_array(data)


def is_array(data: Any) -> bool:
    """Whether `data` is one array, or a tensor."""
    return hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__array__")


def register_as_pytree(batch: Any) -> Any:
    """`batch`; registers its class with JAX as a pytree if it is a plain dataclass (`size` is static)."""
    if dataclasses.is_dataclass(batch) and jax.tree_util.all_leaves([batch]):
        data = [field.name for field in _data_fields(batch)]
        static = [field.name for field in dataclasses.fields(batch) if field.name not in data]
        jax.tree_util.register_dataclass(type(batch), data, static)
    return batch


def check_batch(batch: Batch, where: str) -> None:
    """Raises a `DataError` for non-numeric or empty entries, before anything is compiled."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise DataError(f"The {where} has no arrays. Return arrays, or a tuple, dict or dataclass of arrays.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        kind = np.asarray(leaf).dtype if dtype is None else dtype
        name = leaf_path(path) or "an entry"
        if not (jnp.issubdtype(kind, np.number) or kind == np.bool_ or jnp.issubdtype(kind, jax.dtypes.extended)):
            raise DataError(
                f"The {where} has {name} of type {type(leaf).__name__} with dtype {kind}, which is not numeric. "
                "Convert it to numbers in the loader, or remove it; text labels become integers by "
                "`np.unique(words, return_inverse=True)`."
            )
        if np.shape(leaf)[:1] == (0,):
            raise DataError(f"The {where} has {name} of shape {np.shape(leaf)}: it has no examples. Remove it.")


def as_example(batch: Any) -> Batch:
    """An example batch as arrays, converted like the batches of a loader."""
    are_arrays = all(isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))
    return batch if are_arrays else as_arrays(batch, copy=False)


def _as_array(leaf: Any, *, copy: bool) -> Any:
    if isinstance(leaf, jax.Array | np.generic | int | float):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy() if copy else leaf
    shared = _shared(leaf)
    return shared.copy() if copy and shared.base is not None else shared


def _shared(leaf: Any) -> np.ndarray:
    """A tensor of another library as numpy, without a copy where possible."""
    if hasattr(leaf, "detach"):  # torch
        tensor = leaf.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # torch cannot convert it to numpy; float32 represents it exactly
            return tensor.float().numpy().astype(jnp.bfloat16)
        return tensor.numpy()
    return np.asarray(leaf)


def _is_numbers(values: Any) -> bool:
    """Whether `values` is a list of numbers, or of lists of numbers, and not of arrays."""
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, bool | int | float) or _is_numbers(value) for value in values)


def _data_fields(batch: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(batch) if f.name != "size" and f.metadata.get("pytree_node", True)]
