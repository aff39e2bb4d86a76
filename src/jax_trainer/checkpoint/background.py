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
_REST, _LONGEST_REST = 9.0, 1.0  # times what the last one took, and seconds, between two that nobody waits for
_log = logging.getLogger("jax_trainer")

Work = Callable[[], object]
Needed = Callable[[Work | None, list[Work]], list[Work]]


class SavingThread:
    """Runs one function at a time in a thread; others wait for it in a list, from which they may be taken again.

    Between two of them it rests, so that a program which saves all the time computes most of it; not while somebody
    waits. `wait` and `check` raise what the last one raised, once. After a failure nothing is begun until that is done.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what  # for those who look at threads, and for those who wait
        self._thread: threading.Thread | None = None
        self._is_done = threading.Event()
        self._failure: BaseException | None = None
        self._is_given_up = False
        self._changed = threading.Condition()
        self._waiting: list[Work] = []
        self._current: Work | None = None
        self._rests_until, self._hurried = 0.0, 0  # by the monotonic clock; how many wait for it now
        _all.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether something is being done now, or will be."""
        # a thread that is not alive although nothing is done belongs to the process that this one was forked from
        return self._thread is not None and not self._is_done.is_set() and self._thread.is_alive()

    def start(self, work: Work) -> None:
        """Begins with `work`, as soon as what was begun before is done; raises what that raised."""
        self.settle(insist=True)
        self.check()
        self._rests_until = 0.0
        self.submit(work)

    def submit(self, work: Work, needed: Needed = lambda current, waiting: waiting) -> None:
        """Does `work` soon. `needed` gets what is being done and what waits, `work` last, and returns what stays."""
        with self._changed:
            self._waiting = needed(self._current, [*self._waiting, work])
            self._begin()

    def wait_for(self, holds: Callable[[list[Work]], bool]) -> float:
        """Waits until `holds` is true of what waits, or there is a failure. Returns for how many seconds."""
        self._is_given_up = False
        return self._wait_while(lambda: not holds(self._waiting) and self._failure is None)

    def settle(self, *, insist: bool = False) -> float:
        """Waits until there is nothing to do, or there is a failure, and raises nothing. Returns for how many seconds.

        Somebody who was interrupted while waiting does not want to wait: from then on nobody does who does not insist.
        """
        self._is_given_up &= not insist
        with self._changed:
            if self._is_done.is_set():  # otherwise it belongs to the process that this one was forked from
                self._begin()
        return self._wait_while(lambda: True)

    def wait(self) -> None:
        """Waits until there is nothing to do, and raises what went wrong, the last of it."""
        self.settle()
        failure = self._heard()
        while failure is not None and self._waiting and not self._is_given_up:
            self.settle()
            failure = self._heard() or failure
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raises what went wrong in something that is done; does not wait."""
        failure = self._heard()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """At the end of the process: waits, and tells of a failure that nobody asked for."""
        self.settle()
        if self._failure is not None:
            _log.error("%s", self._failure)

    def _heard(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        _unheard.discard(self)
        return failure

    def _wait_while(self, holds: Callable[[], bool]) -> float:
        def is_needed() -> bool:
            is_own = self._thread is threading.current_thread()
            return self.is_busy and holds() and not self._is_given_up and not is_own

        began, patience = time.monotonic(), _PATIENCE
        if not is_needed():
            return 0.0
        self._hurry(1)
        try:
            while is_needed():
                with self._changed:
                    if is_needed():
                        self._changed.wait(_SLICE)  # not `join`, which takes a thread for dead when it is interrupted
                if time.monotonic() - began > patience:
                    _log.warning("Still waiting for %s, since %.0f seconds.", self._what, time.monotonic() - began)
                    patience *= 2
        except KeyboardInterrupt:
            self._is_given_up = True
            raise
        finally:
            self._hurry(-1)
        return time.monotonic() - began

    def _hurry(self, by: int) -> None:
        with self._changed:
            self._hurried += by
            self._changed.notify_all()

    def _begin(self) -> None:
        if self._waiting and self._failure is None and not self.is_busy:
            self._is_done.clear()
            self._thread = threading.Thread(target=self._do_all, name=self._name, daemon=True)
            self._thread.start()

    # in the thread

    def _do_all(self) -> None:
        while (work := self._next()) is not None:
            began = time.monotonic()
            try:
                work()
            except BaseException as error:  # it is raised in the thread that asks
                self._failure = error
                _unheard.add(self)
            finally:
                _give_memory_back()
                self._rests_until = time.monotonic() + min(_REST * (time.monotonic() - began), _LONGEST_REST)

    def _next(self) -> Work | None:
        with self._changed:
            self._current = None
            self._changed.notify_all()
            while self._waiting and self._failure is None:
                if self._hurried or (rest := self._rests_until - time.monotonic()) <= 0:
                    self._current = self._waiting.pop(0)
                    self._changed.notify_all()
                    return self._current
                self._changed.wait(rest)
            self._is_done.set()
            self._changed.notify_all()
        return None


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
