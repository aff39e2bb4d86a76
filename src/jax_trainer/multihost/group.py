"""Exchange of strings between the processes of a job."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax._src import distributed  # its key-value store has no public API; orbax uses it in the same way

TIMEOUT = 600.0  # seconds to wait for other processes: reading a large checkpoint takes a while
_ROOT = "jax_trainer"


class ProcessGroupError(RuntimeError):
    """Another process did not respond in time, or failed."""


class ProcessGroup:
    """The processes of this job; this one has the number `index`, and number 0 is the primary process.

    Every exchange has a topic. All processes must use a topic equally often and in the same order; different topics can
    be used from different threads at the same time. A single process never waits.
    """

    def __init__(self, index: int, count: int, client: Any = None) -> None:
        self.index, self.count, self._client = index, count, client
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which writes files and logs."""
        return self.index == 0

    @property
    def is_multi_process(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def all_gather(self, topic: str, value: str = "", *, timeout: float = TIMEOUT) -> list[str]:
        """The values of all processes, in their order; waits until all have called it, up to `timeout` seconds."""
        if not self.is_multi_process:
            return [value]
        prefix = self._next(topic)
        try:
            self._client.key_value_set(f"{prefix}/{self.index}", value)
            self._client.wait_at_barrier(prefix, int(1000 * timeout))
            values = dict(self._client.key_value_dir_get(f"{prefix}/"))
            # a process deletes its own value of the previous exchange, which all have read by now
            self._delete_previous(topic)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise ProcessGroupError(
                f"Not all of the {self.count} processes reached {topic!r}: {_first(error)}"
            ) from error
        return [values[f"{prefix}/{index}"] for index in range(self.count)]

    def broadcast(self, topic: str, compute: Callable[[], str], *, timeout: float = TIMEOUT) -> str:
        """The result of `compute` in the primary process. If it raises, the other processes raise, too."""
        value, failure = "", None
        if self.is_primary:
            try:
                value = compute()
            except Exception as error:
                failure = error
        message = json.dumps({"value": value, "failed": failure and f"{type(failure).__name__}: {failure}"})
        answer = json.loads(self.all_gather(topic, message, timeout=timeout)[0])
        if failure is not None:
            raise failure
        if answer["failed"]:
            raise ProcessGroupError(f"The primary process failed: {answer['failed']}")
        return answer["value"]

    def put(self, key: str, value: str) -> None:
        """Stores a value under a key, overwriting the previous one; does not wait for other processes."""
        if self.is_multi_process:
            self._client.key_value_set(f"{_ROOT}/values/{key}", value, allow_overwrite=True)

    def get_all(self, folder: str) -> dict[str, str]:
        """All values whose keys start with `folder/`, by the rest of the key; does not wait for other processes."""
        if not self.is_multi_process:
            return {}
        prefix = f"{_ROOT}/values/{folder}/"
        return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}

    def _next(self, topic: str) -> str:
        with self._lock:
            self._uses[topic] += 1
            return f"{_ROOT}/{topic}/{self._uses[topic]}"

    def _delete_previous(self, topic: str) -> None:
        with self._lock:
            before = self._uses[topic] - 1
        if before:  # all processes are past the current barrier, and so have read the previous values
            self._client.key_value_delete(f"{_ROOT}/{topic}/{before}/{self.index}")


@cache
def _cached_group(index: int, count: int, client: Any) -> ProcessGroup:
    return ProcessGroup(index, count, client)


def process_group() -> ProcessGroup:
    """The processes of this job. Initialises JAX's devices."""
    count = jax.process_count()
    return _cached_group(jax.process_index(), count, distributed.global_state.client if count > 1 else None)


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]
