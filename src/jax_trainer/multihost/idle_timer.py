"""How long one of several processes let its devices wait."""

import threading
import time

import jax

JOIN_SECONDS = 2.0


class IdleTimer:
    """Measures how long the devices of this process were idle, because it did not dispatch the next step.

    The devices of all other processes wait meanwhile. A thread waits for the end of the last dispatch, and records the
    time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._dispatched: jax.Array | None = None  # the result of the last dispatch
        self._ended: tuple[jax.Array, float] | None = None  # the last result that is ready, and since when
        self._wake, self._is_over = threading.Event(), False

    def __enter__(self) -> "IdleTimer":
        self._thread = threading.Thread(target=self._follow, name="jax-trainer-idle-timer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._wake.set()
        self._thread.join(JOIN_SECONDS)  # not for ever: a step with a process that has died never ends

    def before_dispatch(self) -> None:
        """Counts the time since the last dispatch ended as idle."""
        ended = self._ended
        if ended is not None and ended[0] is self._dispatched:
            self.seconds += time.perf_counter() - ended[1]

    def after_dispatch(self, result: jax.Array) -> None:
        """Records a dispatch, which ends when `result` is ready."""
        self._dispatched = result
        self._wake.set()

    def _follow(self) -> None:
        while not self._is_over:
            self._wake.wait()
            self._wake.clear()
            dispatched = self._dispatched
            if dispatched is not None and not self._is_over:
                try:
                    dispatched.block_until_ready()
                except Exception:
                    return
                self._ended = (dispatched, time.perf_counter())
