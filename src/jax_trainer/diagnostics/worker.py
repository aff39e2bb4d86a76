"""Threads that run queued jobs one after the other; the errors of a `Worker` are raised where its jobs are awaited."""

import concurrent.futures.thread  # noqa: F401 - for the order of exit handlers: last registered, first called
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_PATIENCE = 60.0  # seconds until a warning says what is being waited for
# the pause between jobs that no caller waits for: a multiple of the last job's time, and at most so many seconds
_PAUSE_RATIO, _LONGEST_PAUSE = 24.0, 1.0
_log = logging.getLogger("jax_trainer")

Job = Callable[[], object]
Needed = Callable[[Any, list[Any]], list[Any]]


class QueueThread:
    """A thread that takes jobs from a queue, in order, and knows whether a caller waits for it.

    A subclass says in `_next` which job is next, and in `_run` what to do with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: list[Any] = []
        self._current: Any = None  # the job that is running
        self._waiters = 0  # callers that wait
        self._thread: threading.Thread | None = None
        self._is_done = True  # whether the thread has nothing left to do

    @property
    def is_busy(self) -> bool:
        """Whether a job is running or queued."""
        # a thread that is not alive before its jobs are done belongs to the parent process of a fork
        return not self._is_done and self._thread is not None and self._thread.is_alive()

    def _start_thread(self) -> None:
        self._is_done = False
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _await(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Waits until `condition` holds, at most so many seconds; the thread does not pause. Called with the lock."""
        self._waiters += 1
        self._changed.notify_all()
        try:
            return bool(self._changed.wait_for(condition, seconds))  # not `join`, which a signal does not interrupt
        finally:
            self._waiters -= 1

    # in the thread

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next job; False: there is none.

        Nothing here refers to the job when the next call reports that all are done: a thread that frees its arrays
        while the process exits would abort it.
        """
        with self._changed:
            self._current = None
            self._changed.notify_all()
            job = self._current = self._next()
            self._is_done = job is None
            self._changed.notify_all()
        if job is not None:
            self._run(job)
        return job is not None

    def _next(self) -> Any:
        """Takes the next job from the queue, with the lock; None: the thread ends."""
        raise NotImplementedError

    def _run(self, job: Any) -> None:
        raise NotImplementedError


class Worker(QueueThread):
    """Runs jobs in a thread; queued ones may be dropped again. The thread ends when none is left.

    It pauses between jobs unless a caller waits, so that frequent jobs do not slow training down. `wait` and `check`
    raise the error of the last job, once. After a failure no job starts until the error has been raised. At the exit of
    the process, jobs are finished, and an error that was never raised is logged.

    Args:
        name: of the thread.
        what: is being waited for, in a warning.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name)
        self._what = what
        self._pauses_until = 0.0  # by the monotonic clock
        self._failure: BaseException | None = None
        self._is_interrupted = False
        _all.add(self)

    def start(self, job: Job) -> None:
        """Starts `job` once the previous ones are done; raises their error."""
        self.settle(insist=True)
        self.check()
        self._pauses_until = 0.0
        self.submit(job)

    def submit(self, job: Job, needed: Needed = lambda current, waiting: waiting) -> None:
        """Queues `job`. `needed` gets the running and the queued jobs, `job` last, and returns the queue to keep."""
        with self._changed:
            self._queue = needed(self._current, [*self._queue, job])
            self._resume()

    def wait_for(self, condition: Callable[[list[Any]], bool]) -> float:
        """Waits until `condition` is true of the queue, or a job has failed. Returns the seconds waited."""
        self._is_interrupted = False
        return self._wait_until(lambda: condition(self._queue) or self._failure is not None)

    def settle(self, *, insist: bool = False) -> float:
        """Waits until no job is left or one has failed; raises nothing. Returns the seconds waited.

        After Ctrl-C during a wait, later calls do not wait either, unless they `insist`.
        """
        self._is_interrupted &= not insist
        with self._changed:
            if self._is_done:  # otherwise the thread belongs to the parent process of a fork
                self._resume()
        return self._wait_until(lambda: False)

    def wait(self) -> None:
        """Waits until no job is left, and raises the last error."""
        self.settle()
        failure = self._pop_failure()
        while failure is not None and self._queue and not self._is_interrupted:
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
        """At the exit of the process: waits, also for the end of the thread, and logs an error that was not raised."""
        self.settle()
        if self._thread is not None and self._is_done:
            self._thread.join()
        if self._failure is not None:
            _log.error("%s", self._failure)

    def _pop_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        _unreported.discard(self)
        return failure

    def _wait_until(self, condition: Callable[[], bool]) -> float:
        if self._is_interrupted or self._thread is threading.current_thread():
            return 0.0
        started, patience, is_over = time.monotonic(), _PATIENCE, lambda: condition() or not self.is_busy
        with self._changed:
            if is_over():
                return 0.0
            try:
                while not self._await(is_over, patience):
                    _log.warning("Still waiting for %s after %.0f seconds.", self._what, time.monotonic() - started)
                    patience *= 2
            except KeyboardInterrupt:
                self._is_interrupted = True
                raise
        return time.monotonic() - started

    def _resume(self) -> None:
        if self._queue and self._failure is None and not self.is_busy:
            self._start_thread()

    # in the thread

    def _next(self) -> Any:
        while self._queue and self._failure is None:
            if self._waiters or (pause := self._pauses_until - time.monotonic()) <= 0:
                return self._queue.pop(0)
            self._changed.wait(pause)
        return None

    def _run(self, job: Job) -> None:
        started = time.monotonic()
        try:
            job()
        except BaseException as error:  # raised in the calling thread
            self._failure = error
            _unreported.add(self)
        finally:
            now = time.monotonic()
            self._pauses_until = now + min(_PAUSE_RATIO * (now - started), _LONGEST_PAUSE)


_all: "WeakSet[Worker]" = WeakSet()
_unreported: set[Worker] = set()  # keeps them alive until their error is raised


def _finish_all() -> None:
    for worker in list(_all):
        worker.finish()


# `atexit` is too late: by then executors refuse new tasks, which orbax needs to finish a write
threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
