"""Beginning and ending the epochs of somebody else's loader: each can be drawn again, and leaves nothing behind."""

import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from jax_trainer.datasets.foreign import DataError


def begin_epoch(loader: Any, epoch: int, seed: int | None = None) -> int | None:
    """Tells `loader` which epoch comes: by `set_epoch` where there is one, and by seeding torch's shuffling.

    A torch loader shuffles by numbers that go on from epoch to epoch, so that nobody could draw its third epoch
    without drawing the first two. Here every epoch begins with a seed made of the loader's own and the epoch's number.
    One that was given none takes `seed`, or else that of torch, which is another one in every process: it is returned,
    to be kept with the position.
    """
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    if not _is_torch(loader):
        return seed
    seed = sys.modules["torch"].initial_seed() if seed is None else seed  # whoever made the loader imported torch
    remember_seed(loader)
    _seed_torch(loader, f"{seed if loader.first_seed is None else loader.first_seed} {epoch}")
    return seed


def begins_anew(loader: Any) -> bool:
    """Whether every epoch of `loader` begins at its beginning, wherever the one before stopped, as torch's do."""
    return _is_torch(loader)


def counts_on(loader: Any) -> bool:
    """Whether something of `loader` goes on over the ends of epochs, so that the next one needs its state.

    Of torch's that is a dataset with a state of its own, in this process or in workers that live as long.
    """
    if not _is_torch(loader):
        return True
    lives_on = not loader.num_workers or loader.persistent_workers
    return lives_on and callable(getattr(loader.dataset, "load_state_dict", None))


def opener(function: Callable[..., Any], name: str) -> Callable[[int], Iterable[Any]]:
    """`function` as one of the epoch's number, whether it asks for it or not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C tell nothing
        return lambda epoch: function()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asked = [p.name for p in parameters if p.default is p.empty and p.kind in positional]
    if len(asked) > 1:
        raise DataError(
            f"The {name!r} data is the function `{getattr(function, '__name__', function)}`, which asks for "
            f"{', '.join(asked)}. A function that returns batches takes nothing, or the number of the epoch."
        )
    return function if asked else lambda epoch: function()


def end_iterator(batches: Any, loader: Any) -> None:
    """Ends an iterator over `loader` that nobody uses any more, and the worker processes that it has."""
    shut_down = getattr(batches, "_shutdown_workers", None)  # torch has no public word for it
    if shut_down is None:
        close = getattr(batches, "close", None)
        if callable(close):
            close()
    elif not getattr(loader, "persistent_workers", False):
        shut_down()


def kill_workers(batches: Any) -> None:
    """Ends the worker processes of a torch iterator that does not answer."""
    for worker in getattr(batches, "_workers", ()):
        worker.kill()


def remember_seed(loader: Any) -> None:
    """Notes with a torch loader the seed that was chosen for it, or None, before its generator is changed."""
    if _is_torch(loader) and not hasattr(loader, "first_seed"):
        sampler = getattr(loader, "sampler", None)
        # torchdata's own samplers make themselves a generator with a seed that nobody chose
        chosen = None if type(sampler).__module__.startswith("torchdata.") else getattr(sampler, "generator", None)
        given = loader.generator or chosen
        loader.first_seed = None if given is None else given.initial_seed()


def _seed_torch(loader: Any, words: str) -> None:
    loader.generator = sys.modules["torch"].Generator()
    loader.generator.manual_seed(zlib.crc32(words.encode()))
    if hasattr(getattr(loader, "sampler", None), "generator"):
        loader.sampler.generator = loader.generator


def _is_torch(loader: Any) -> bool:
    torch = sys.modules.get("torch.utils.data")  # whoever made such a loader imported it
    return torch is not None and isinstance(loader, torch.DataLoader)
