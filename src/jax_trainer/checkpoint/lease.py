"""The lease of a run in a store, which keeps two machines off one run: the lock of its folder does not reach that far.

`LEASE.json` names the process that trains, which renews it every 20 seconds. It is created only if it is not there
(a conditional write, where the store has it), and deleted at the end of the run. One that is not renewed for a minute
is of a machine that is gone: whoever finds it waits that long, and takes it over.
"""

import json
import logging
import platform
import threading
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from jax_trainer.checkpoint.lock import RunInUseError, is_alive, this_process
from jax_trainer.datasets.storage import Store, StoreError

FILE = "LEASE.json"
SECONDS = 60.0  # without a renewal, after which a lease is taken over
_RENEWALS = 3  # in that time
_PAUSE = 1.0  # seconds between two looks at the lease of another process
_log = logging.getLogger("jax_trainer")


class Lease:
    """The lease of the run at `store`.

    Attributes:
        is_held: whether this process has it.
        is_lost: whether another process has taken it over meanwhile.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._id = store, uuid4().hex
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="jax-trainer lease", daemon=True)
        self.is_held = self.is_lost = False

    def take(self) -> None:
        """Takes the lease, after waiting for one that is not renewed; a `RunInUseError` if another process has it.

        Raises a `StoreError` if the store cannot be reached.
        """
        seen, since, was_told = self._read(), time.monotonic(), False
        while seen is not None and not self._is_stale(seen, time.monotonic() - since):
            if not was_told:
                was_told = True
                text = "The run at %s was last trained by %s. Waiting up to %.0f s to see whether it still is."
                _log.warning(text, self._store.url, _described(seen), SECONDS)
            time.sleep(_PAUSE)
            now = self._read()
            if now is not None and (now.get("id"), now.get("renewed")) != (seen.get("id"), seen.get("renewed")):
                raise RunInUseError(
                    f"The run at {self._store.url} is in use by {_described(now)}. Wait until it ends, stop it, or "
                    "start a run with another name."
                )
            seen = now
        if seen is not None:
            self._store.delete([FILE])
        if not self._store.create(FILE, self._text()):
            other = self._read() or {}
            raise RunInUseError(f"The run at {self._store.url} was just started by {_described(other)}.")
        self.is_held = True
        if self._thread.ident is None:
            self._thread.start()

    def release(self) -> None:
        """Deletes the lease, if this process has it."""
        self._stop.set()
        with self._lock:
            is_held, self.is_held = self.is_held, False
            if is_held and not self._is_of_another(self._read()):
                self._store.delete([FILE])

    def _renew(self) -> None:
        while not self._stop.wait(SECONDS / _RENEWALS):
            with self._lock:
                if not self.is_held:
                    return
                try:
                    if self._is_of_another(self._read()):
                        self.is_held, self.is_lost = False, True
                        return
                    self._store.write(FILE, self._text())
                except StoreError:  # the mirror reports that the store cannot be reached
                    continue

    def _is_of_another(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("id") != self._id

    def _is_stale(self, found: dict[str, Any], waited: float) -> bool:
        """Whether the process that has the lease is gone."""
        pid = found.get("pid")
        if found.get("host") == platform.node() and isinstance(pid, int) and not is_alive(pid):
            return True
        try:
            age = (datetime.now(UTC) - datetime.fromisoformat(str(found.get("renewed")))).total_seconds()
        except (TypeError, ValueError):  # damaged, or being written
            age = 0.0
        return waited >= SECONDS or age > 2 * SECONDS  # clocks may differ by a minute

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._store.read(FILE))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _text(self) -> bytes:
        renewed = datetime.now(UTC).isoformat(timespec="milliseconds")
        return (json.dumps({"id": self._id, **this_process(), "renewed": renewed}) + "\n").encode()


def _described(found: dict[str, Any]) -> str:
    return f"the process {str(found.get('pid'))[:20]} on {str(found.get('host'))[:100]!r}"
