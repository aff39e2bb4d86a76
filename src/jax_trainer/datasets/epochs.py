"""Beginning and ending the epochs of somebody else's loader: each can be drawn again, and leaves nothing behind."""

import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any


def begin_epoch(loader: Any, epoch: int) -> None:
    """Tells `loader` which epoch comes: by `set_epoch` where there is one, and by seeding torch's shuffling.

    A torch loader shuffles by numbers that go on from epoch to epoch, so that nobody could draw its third epoch
    without drawing the first two. Here every epoch begins with a seed made of the loader's own (or torch's) seed and
    the epoch's number.
    """
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    if _is_torch(loader):
        _seed_torch(loader, epoch)


def opener(function: Callable[..., Any]) -> Callable[[int], Iterable[Any]]:
    """`function` as one of the epoch's number, whether it asks for it or not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C tell nothing
        return lambda epoch: function()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asks = any(p.default is p.empty and p.kind in positional for p in parameters)
    return function if asks else lambda epoch: function()


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
    """Notes a torch loader's seed with the loader, before a run or a restored state changes its generator."""
    if _is_torch(loader) and not hasattr(loader, "first_seed"):
        sampler = getattr(loader, "sampler", None)
        # torchdata's own samplers make themselves a generator with a seed that nobody chose
        chosen = None if type(sampler).__module__.startswith("torchdata.") else getattr(sampler, "generator", None)
        given = loader.generator or chosen
        loader.first_seed = sys.modules["torch"].initial_seed() if given is None else given.initial_seed()


def _seed_torch(loader: Any, epoch: int) -> None:
    remember_seed(loader)
    loader.generator = sys.modules["torch"].Generator()  # whoever made the loader imported torch
    loader.generator.manual_seed(zlib.crc32(f"{loader.first_seed} {epoch}".encode()))
    if hasattr(getattr(loader, "sampler", None), "generator"):
        loader.sampler.generator = loader.generator


def _is_torch(loader: Any) -> bool:
    return type(loader).__module__.partition(".")[0] in ("torch", "torchdata") and hasattr(loader, "generator")
