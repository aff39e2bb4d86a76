"""For how long the devices of this process had nothing to do, because it did not send them the next step.

That is what the others of several processes wait for: while a process is late, the devices of all others are busy
waiting for its own. One process alone measures nothing.
"""

import threading
import time

import jax


class IdleTimer:
    """Measures idle time: a thread waits for the end of what was sent last, and notes when that was.

    Args:
        measures: whether it does; otherwise `seconds` stays 0.
    """

    def __init__(self, *, measures: bool) -> None:
        self.seconds = 0.0
        self._measures = measures
        self._sent: jax.Array | None = None  # the last that was sent
        self._ended: tuple[jax.Array, float] | None = None  # the last that has ended, and when
        self._news, self._is_over = threading.Event(), False

    def __enter__(self) -> "IdleTimer":
        if self._measures:
            threading.Thread(target=self._follow, name="jax-trainer-idling", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._news.set()

    def sending(self) -> None:
        """The next step is about to be sent; whatever time has passed since the last one ended was idle."""
        ended = self._ended
        if ended is not None and ended[0] is self._sent:
            self.seconds += time.perf_counter() - ended[1]

    def sent(self, result: jax.Array) -> None:
        """A step was sent, and ends when `result` is there."""
        if self._measures:
            self._sent = result
            self._news.set()

    def _follow(self) -> None:
        while not self._is_over:
            self._news.wait()
            self._news.clear()
            sent = self._sent
            if sent is not None and not self._is_over:
                try:
                    sent.block_until_ready()
                except Exception:
                    return
                self._ended = (sent, time.perf_counter())
