"""Starts and ends epochs of torch and other loaders, so that each epoch is reproducible and releases its workers."""

import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from jax_trainer.datasets.foreign import DataError


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
    _seed_torch(loader, f"{seed if loader.first_seed is None else loader.first_seed} {epoch}")
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


def _seed_torch(loader: Any, text: str) -> None:
    loader.generator = sys.modules["torch"].Generator()
    loader.generator.manual_seed(zlib.crc32(text.encode()))
    if hasattr(getattr(loader, "sampler", None), "generator"):
        loader.sampler.generator = loader.generator


def _is_torch(loader: Any) -> bool:
    torch = sys.modules.get("torch.utils.data")  # not imported: no torch loader exists
    return torch is not None and isinstance(loader, torch.DataLoader)


def _is_hugging_face_stream(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # not imported: no stream exists; a user's file may have this name, too
    return isinstance(data, getattr(datasets, "IterableDataset", ()))
