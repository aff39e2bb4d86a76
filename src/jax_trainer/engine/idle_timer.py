"""Measures how long the devices of this process were idle, because it did not dispatch the next step.

With several processes, the devices of all others wait meanwhile. A single process measures nothing.
"""

import threading
import time

import jax


class IdleTimer:
    """Measures idle time: a thread waits for the end of the last dispatch, and records the time.

    Args:
        measures: False keeps `seconds` at 0.
    """

    def __init__(self, *, measures: bool) -> None:
        self.seconds = 0.0
        self._measures = measures
        self._dispatched: jax.Array | None = None  # the result of the last dispatch
        self._ended: tuple[jax.Array, float] | None = None  # the last result that is ready, and since when
        self._wake, self._is_over = threading.Event(), False

    def __enter__(self) -> "IdleTimer":
        if self._measures:
            threading.Thread(target=self._follow, name="jax-trainer-idle-timer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._wake.set()

    def before_dispatch(self) -> None:
        """Counts the time since the last dispatch ended as idle."""
        ended = self._ended
        if ended is not None and ended[0] is self._dispatched:
            self.seconds += time.perf_counter() - ended[1]

    def after_dispatch(self, result: jax.Array) -> None:
        """Records a dispatch, which ends when `result` is ready."""
        if self._measures:
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
