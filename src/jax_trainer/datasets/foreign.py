"""Data of other libraries: batches of tensors, lists, mappings and plain dataclasses become arrays; the epochs of torch
and other loaders become reproducible, and release their workers.
"""

import dataclasses
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
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
    """A number, an array, or a tensor of another library, as numpy; without a copy where possible."""
    if isinstance(leaf, jax.Array | np.generic | int | float):
        return leaf
    if hasattr(leaf, "detach"):  # torch
        tensor = leaf.detach().cpu()
        is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
        # torch cannot convert it to numpy; float32 represents it exactly
        array = tensor.float().numpy().astype(jnp.bfloat16) if is_bfloat16 else tensor.numpy()
    else:
        array = np.asarray(leaf)
    return array.copy() if copy and (array is leaf or array.base is not None) else array


def _is_numbers(values: Any) -> bool:
    """Whether `values` is a list of numbers, or of lists of numbers, and not of arrays."""
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, bool | int | float) or _is_numbers(value) for value in values)


def _data_fields(batch: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(batch) if f.name != "size" and f.metadata.get("pytree_node", True)]


# epochs of loaders


def start_epoch(loader: Any, epoch: int, seed: int | None = None) -> int | None:
    """Starts epoch `epoch` of `loader`: calls `set_epoch` if it exists, and seeds the shuffling of torch loaders.

    The generator of a torch loader advances from epoch to epoch, so its third epoch depends on the first two. Here
    every epoch is seeded by the seed of the loader and the epoch number. A loader without a seed uses `seed`, or else
    `torch.initial_seed()`, which differs between processes: it is returned, to be saved with the position.
    """
    parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if _is_hugging_face_stream(part):
            part.load_state_dict(None)  # else one that was loaded is where every iteration of its epoch starts
    if not _is_torch(loader):
        return seed
    seed = sys.modules["torch"].initial_seed() if seed is None else seed  # imported, because `loader` is a torch loader
    remember_seed(loader)
    first_seed = seed if loader.first_seed is None else loader.first_seed
    loader.generator = sys.modules["torch"].Generator()
    loader.generator.manual_seed(zlib.crc32(f"{first_seed} {epoch}".encode()))
    if hasattr(getattr(loader, "sampler", None), "generator"):
        loader.sampler.generator = loader.generator
    return seed


def restarts_each_epoch(loader: Any) -> bool:
    """Whether every epoch of `loader` starts at its first batch, wherever the previous one stopped, as torch's do."""
    return _is_torch(loader) or _is_hugging_face_stream(loader)


def has_state_across_epochs(loader: Any) -> bool:
    """Whether the next epoch of `loader` depends on its state after the previous one.

    Of torch loaders, those do whose dataset is stateful, in this process or in persistent workers.
    """
    if not _is_torch(loader):
        return True
    lives_on = not loader.num_workers or loader.persistent_workers
    return lives_on and callable(getattr(loader.dataset, "load_state_dict", None))


def has_exact_state(loader: Any) -> bool:
    """Whether the state of `loader`, if it has one, is its position.

    That of a Hugging Face stream lacks the examples in its shuffle buffers.
    """
    stream = getattr(loader, "dataset", None) if _is_torch(loader) else loader
    parts: list[Any] = [getattr(stream, "_ex_iterable", None)] if _is_hugging_face_stream(stream) else []
    for part in parts:  # grows: a stream is a chain or tree of them
        parts += [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return not any(part is None or getattr(part, "buffer_size", 1) > 1 for part in parts)


def opener(function: Callable[..., Any], name: str) -> Callable[[int], Iterable[Any]]:
    """`function` as a function of the epoch number, which it may take or not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions have no signature
        return lambda epoch: function()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in positional]
    if len(required) > 1:
        raise DataError(
            f"The {name!r} data is the function `{getattr(function, '__name__', function)}`, which requires "
            f"{', '.join(required)}. A function that returns batches takes no argument, or the epoch number."
        )
    return function if required else lambda epoch: function()


def close_iterator(batches: Any, loader: Any) -> None:
    """Closes an iterator over `loader` and its worker processes."""
    shut_down = getattr(batches, "_shutdown_workers", None)  # torch has no public method for it
    if shut_down is None:
        close = getattr(batches, "close", None)
        if callable(close):
            close()
    elif not getattr(loader, "persistent_workers", False):
        shut_down()


def kill_workers(batches: Any) -> None:
    """Kills the worker processes of a torch iterator that hangs."""
    if hasattr(batches, "_shutdown_workers"):
        for worker in getattr(batches, "_workers", ()):
            worker.kill()


def remember_seed(loader: Any) -> None:
    """Stores the seed of a torch loader, or None, on the loader before its generator is replaced."""
    if _is_torch(loader) and not hasattr(loader, "first_seed"):
        sampler = getattr(loader, "sampler", None)
        # torchdata's samplers create a generator with a random seed
        chosen = None if type(sampler).__module__.startswith("torchdata.") else getattr(sampler, "generator", None)
        generator = loader.generator or chosen
        loader.first_seed = None if generator is None else generator.initial_seed()


def _is_torch(loader: Any) -> bool:
    torch = sys.modules.get("torch.utils.data")  # not imported: no torch loader exists
    return torch is not None and isinstance(loader, torch.DataLoader)


def _is_hugging_face_stream(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # not imported: no stream exists; a user's file may have this name, too
    return isinstance(data, getattr(datasets, "IterableDataset", ()))
