"""Words between the processes of a job."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax._src import distributed  # its key-value store has no public name; orbax and others use it in the same way

PATIENCE = 600.0  # seconds to wait for the others: reading a large checkpoint takes a while
_ROOT = "jax_trainer"


class ProcessGroupError(RuntimeError):
    """Another process did not answer, or could not do its part."""


class ProcessGroup:
    """The processes of this job, of which this one is number `index`; number 0 leads.

    Every word belongs to a topic. All processes must use a topic equally often and in the same order; several topics
    can be used from several threads at the same time. Alone, a process talks to itself, and nothing waits.
    """

    def __init__(self, index: int, count: int, client: Any = None) -> None:
        self.index, self.count, self._client = index, count, client
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def is_primary(self) -> bool:
        """Whether this process is the one that writes."""
        return self.index == 0

    @property
    def is_multi_process(self) -> bool:
        """Whether there is anybody else."""
        return self.count > 1

    def all_gather(self, topic: str, word: str = "", *, patience: float = PATIENCE) -> list[str]:
        """What every process says, in their order; waits until all have said it."""
        if not self.is_multi_process:
            return [word]
        place = self._next(topic)
        try:
            self._client.key_value_set(f"{place}/{self.index}", word)
            self._client.wait_at_barrier(place, int(1000 * patience))
            said = dict(self._client.key_value_dir_get(f"{place}/"))
            # nobody deletes before all have read: each word of the one before is deleted by who said it
            self._forget(topic)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise ProcessGroupError(
                f"Not all of the {self.count} processes came as far as {topic!r}: {_first(error)}"
            ) from error
        return [said[f"{place}/{index}"] for index in range(self.count)]

    def broadcast(self, topic: str, say: Callable[[], str], *, patience: float = PATIENCE) -> str:
        """What the lead's `say` returns, which nobody else calls. Where it raises, all do: the lead its own error."""
        word, failure = "", None
        if self.is_primary:
            try:
                word = say()
            except Exception as error:
                failure = error
        told = json.dumps({"word": word, "failed": failure and f"{type(failure).__name__}: {failure}"})
        answer = json.loads(self.all_gather(topic, told, patience=patience)[0])
        if failure is not None:
            raise failure
        if answer["failed"]:
            raise ProcessGroupError(f"The first process could not go on: {answer['failed']}")
        return answer["word"]

    def put(self, name: str, word: str) -> None:
        """Leaves a word under a name, in place of the one before; waits for nobody."""
        if self.is_multi_process:
            self._client.key_value_set(f"{_ROOT}/notes/{name}", word, allow_overwrite=True)

    def notes(self, folder: str) -> dict[str, str]:
        """All words that were left under names that begin with `folder/`, without it; waits for nobody."""
        if not self.is_multi_process:
            return {}
        place = f"{_ROOT}/notes/{folder}/"
        return {name.removeprefix(place): word for name, word in self._client.key_value_dir_get(place)}

    def _next(self, topic: str) -> str:
        with self._lock:
            self._uses[topic] += 1
            return f"{_ROOT}/{topic}/{self._uses[topic]}"

    def _forget(self, topic: str) -> None:
        with self._lock:
            before = self._uses[topic] - 1
        if before:  # everybody is past the barrier of this one, and so has read what was said before
            self._client.key_value_delete(f"{_ROOT}/{topic}/{before}/{self.index}")


@cache
def _found(index: int, count: int, client: Any) -> ProcessGroup:
    return ProcessGroup(index, count, client)


def process_group() -> ProcessGroup:
    """The processes of this job. Asking starts JAX's devices."""
    count = jax.process_count()
    return _found(jax.process_index(), count, distributed.global_state.client if count > 1 else None)


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]
