"""Work in a thread of its own: one piece at a time, with a failure that is told once, and never lost at the end."""

import concurrent.futures.thread  # noqa: F401 - for its order: what is registered last is called first
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

_SLICE = 0.05  # seconds: a signal gets through a wait this long at the latest
_PATIENCE = 60.0  # seconds until one is told what is being waited for
_log = logging.getLogger("jax_trainer")


class SavingThread:
    """Runs one function at a time in a thread. `wait` and `check` raise what the last one raised, once."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what  # for those who look at threads, and for those who wait
        self._thread: threading.Thread | None = None
        self._is_done = threading.Event()
        self._failure: BaseException | None = None
        self._is_given_up = False
        _all.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether something is being done now."""
        # a thread that is not alive although nothing is done belongs to the process that this one was forked from
        return self._thread is not None and not self._is_done.is_set() and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Begins with `work`, as soon as what was begun before is done; raises what that raised."""
        self.settle(insist=True)
        self.check()
        self._is_done.clear()
        self._thread = threading.Thread(target=self._do, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def settle(self, *, insist: bool = False) -> float:
        """Waits until nothing is being done, and raises nothing. Returns for how many seconds.

        Somebody who was interrupted while waiting does not want to wait: from then on nobody does who does not insist.
        """
        self._is_given_up &= not insist
        began, patience = time.monotonic(), _PATIENCE
        while self.is_busy and not self._is_given_up and self._thread is not threading.current_thread():
            try:
                self._is_done.wait(_SLICE)  # not `join`, which takes a thread for dead when it is interrupted
            except KeyboardInterrupt:
                self._is_given_up = True
                raise
            if time.monotonic() - began > patience:
                _log.warning("Still waiting for %s, since %.0f seconds.", self._what, time.monotonic() - began)
                patience *= 2
        return time.monotonic() - began

    def wait(self) -> None:
        """Waits until nothing is being done, and raises what went wrong."""
        self.settle()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in something that is done; does not wait."""
        failure, self._failure = self._failure, None
        _unheard.discard(self)
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """At the end of the process: waits, and tells of a failure that nobody asked for."""
        self.settle()
        if self._failure is not None:
            _log.error("%s", self._failure)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # it is raised in the thread that asks
            self._failure = error
            _unheard.add(self)
        finally:
            _give_memory_back()
            self._is_done.set()


def saving_thread(folder: Path) -> SavingThread:
    """The thread that saves to `folder`, one in this process: whoever restores waits for it, whoever saves."""
    key = os.path.realpath(folder)
    thread = _by_folder.get(key)
    if thread is None:
        thread = _by_folder[key] = SavingThread("jax-trainer-save", f"a checkpoint in {folder}")
    return thread


def _give_memory_back() -> None:
    """Returns what was freed to the system, where the C library can.

    The threads that write arrays leave it scattered over the memory of each of them: 80 MB more, and growing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_all: "WeakSet[SavingThread]" = WeakSet()
_by_folder: "WeakValueDictionary[str, SavingThread]" = WeakValueDictionary()
_unheard: set[SavingThread] = set()  # also when nobody else remembers them


def _finish_all() -> None:
    for thread in list(_all):
        thread.finish()


# `atexit` comes too late: by then no executor takes work, and orbax needs some to write to the end
threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
