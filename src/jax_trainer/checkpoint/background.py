"""A background thread for saves: one job at a time; failures are raised once and never lost at exit."""

import concurrent.futures.thread  # noqa: F401 - for the order of exit handlers: last registered, first called
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

_SLICE = 0.05  # seconds after which a signal interrupts a wait at the latest
_PATIENCE = 60.0  # seconds until a warning says what is being waited for
# the pause between jobs that no caller waits for: a multiple of the last job's time, and at most so many seconds
_PAUSE_RATIO, _LONGEST_PAUSE = 24.0, 1.0
_log = logging.getLogger("jax_trainer")

Job = Callable[[], object]
Needed = Callable[[Job | None, list[Job]], list[Job]]


class SavingThread:
    """Runs one job at a time in a thread; queued jobs may be dropped again.

    It pauses between jobs unless a caller waits, so that frequent saves do not slow training down. `wait` and `check`
    raise the error of the last job, once. After a failure no job starts until the error has been raised.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what  # of the thread, and for warnings
        self._thread: threading.Thread | None = None
        self._is_done = threading.Event()
        self._failure: BaseException | None = None
        self._is_interrupted = False
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._current: Job | None = None
        self._pauses_until, self._waiters = 0.0, 0  # by the monotonic clock; number of callers that wait
        _all.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running or queued."""
        # a thread that is not alive before its jobs are done belongs to the parent process of a fork
        return self._thread is not None and not self._is_done.is_set() and self._thread.is_alive()

    def start(self, job: Job) -> None:
        """Starts `job` once the previous ones are done; raises their error."""
        self.settle(insist=True)
        self.check()
        self._pauses_until = 0.0
        self.submit(job)

    def submit(self, job: Job, needed: Needed = lambda current, waiting: waiting) -> None:
        """Queues `job`. `needed` gets the running and the queued jobs, `job` last, and returns the queue to keep."""
        with self._changed:
            self._waiting = needed(self._current, [*self._waiting, job])
            self._start_thread()

    def wait_for(self, condition: Callable[[list[Job]], bool]) -> float:
        """Waits until `condition` is true of the queue, or a job has failed. Returns the seconds waited."""
        self._is_interrupted = False
        return self._wait_while(lambda: not condition(self._waiting) and self._failure is None)

    def settle(self, *, insist: bool = False) -> float:
        """Waits until no job is left or one has failed; raises nothing. Returns the seconds waited.

        After Ctrl-C during a wait, later calls do not wait either, unless they `insist`.
        """
        self._is_interrupted &= not insist
        with self._changed:
            if self._is_done.is_set():  # otherwise the thread belongs to the parent process of a fork
                self._start_thread()
        return self._wait_while(lambda: True)

    def wait(self) -> None:
        """Waits until no job is left, and raises the last error."""
        self.settle()
        failure = self._pop_failure()
        while failure is not None and self._waiting and not self._is_interrupted:
            self.settle()
            failure = self._pop_failure() or failure
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raises the error of a finished job; does not wait."""
        failure = self._pop_failure()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """At process exit: waits, also for the end of the thread, and logs an error that was never raised."""
        self.settle()
        if self._thread is not None and self._is_done.is_set():
            self._thread.join()
        if self._failure is not None:
            _log.error("%s", self._failure)

    def _pop_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        _unreported.discard(self)
        return failure

    def _wait_while(self, condition: Callable[[], bool]) -> float:
        def is_needed() -> bool:
            is_own = self._thread is threading.current_thread()
            return self.is_busy and condition() and not self._is_interrupted and not is_own

        started, patience = time.monotonic(), _PATIENCE
        if not is_needed():
            return 0.0
        self._count_waiters(1)
        try:
            while is_needed():
                with self._changed:
                    if is_needed():
                        self._changed.wait(_SLICE)  # not `join`, which marks a thread as dead when interrupted
                if time.monotonic() - started > patience:
                    _log.warning("Still waiting for %s after %.0f seconds.", self._what, time.monotonic() - started)
                    patience *= 2
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        finally:
            self._count_waiters(-1)
        return time.monotonic() - started

    def _count_waiters(self, change: int) -> None:
        with self._changed:
            self._waiters += change
            self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._waiting and self._failure is None and not self.is_busy:
            self._is_done.clear()
            self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
            self._thread.start()

    # in the thread

    def _run_jobs(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next job; False: there is none.

        Nothing here refers to the job when the next call reports that all are done: a thread that frees its arrays
        while the process exits would abort it.
        """
        job = self._next()
        if job is None:
            return False
        started = time.monotonic()
        try:
            job()
        except BaseException as error:  # raised in the calling thread
            self._failure = error
            _unreported.add(self)
        finally:
            _trim_memory()
            self._pauses_until = time.monotonic() + min(_PAUSE_RATIO * (time.monotonic() - started), _LONGEST_PAUSE)
        return True

    def _next(self) -> Job | None:
        with self._changed:
            self._current = None
            self._changed.notify_all()
            while self._waiting and self._failure is None:
                if self._waiters or (pause := self._pauses_until - time.monotonic()) <= 0:
                    self._current = self._waiting.pop(0)
                    self._changed.notify_all()
                    return self._current
                self._changed.wait(pause)
            self._is_done.set()
            self._changed.notify_all()
        return None


def saving_thread(folder: Path) -> SavingThread:
    """The thread that saves to `folder`, shared by all stores of this process."""
    key = os.path.realpath(folder)
    thread = _by_folder.get(key)
    if thread is None:
        thread = _by_folder[key] = SavingThread("jax-trainer-save", f"a checkpoint in {folder}")
    return thread


def _trim_memory() -> None:
    """Returns freed memory to the system, if the C library supports it.

    The threads that write arrays fragment their heaps: 80 MB more, and growing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_all: "WeakSet[SavingThread]" = WeakSet()
_by_folder: "WeakValueDictionary[str, SavingThread]" = WeakValueDictionary()
_unreported: set[SavingThread] = set()  # keeps them alive until their error is raised


def _finish_all() -> None:
    for thread in list(_all):
        thread.finish()


# `atexit` is too late: by then executors refuse new tasks, which orbax needs to finish a write
threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
