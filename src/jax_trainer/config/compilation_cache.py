"""Compiled programs on disk: the next process loads them instead of compiling them again.

JAX decides what is cached, and by which key; it has a slot for a cache with `get` and `put`. The one here writes each
entry as a whole, checks every byte of it before JAX loads it, bounds the size of the folder, and never stops a
training: a folder that cannot be used costs one warning.
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_trainer.diagnostics.jax_internals import persistent_cache, set_persistent_cache

VARIABLE = "JAX_TRAINER_COMPILATION_CACHE"
OFF = "off"
MOST_BYTES = 2 << 30  # of all entries; beyond it, those not used for longest are deleted
MIN_SECONDS = 0.05  # of compiling; below it, loading is hardly faster, and there are many such programs
_JAX_MIN_SECONDS = 1.0  # JAX's default of the same
_NEW = ".new-"  # how files begin that are being written
_DIGEST = hashlib.sha256().digest_size
_LOG = logging.getLogger("jax_trainer")


def set_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Sets the folder in which compiled programs are kept for the next process; "off": none.

    The default is `jax_trainer/compiled` in the user's cache folder. The environment variable
    `JAX_TRAINER_COMPILATION_CACHE` sets it, too. If JAX's own cache is configured, such as by
    `JAX_COMPILATION_CACHE_DIR`, that one is used.

    >>> set_compilation_cache("off")
    """
    global _chosen
    if _chosen != os.fspath(folder):
        _chosen = os.fspath(folder)
        _stop()


def use_compilation_cache(by_default: Callable[[], bool] = lambda: True) -> None:
    """Lets JAX load and store compiled programs, unless that is off or JAX's own cache is configured.

    `by_default()`: whether also if no folder was named.
    """
    global _active, _tried
    config: Any = jax.config
    if _active is not None or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    named = _chosen or os.environ.get(VARIABLE)
    if named == OFF or not (named or by_default()):
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = (Path(named) if named else caches / "jax_trainer" / "compiled").expanduser()
    if folder == _tried:
        return
    _tried = folder
    try:
        _check_private(folder)
        _active = CompilationCache(folder)
    except OSError as error:
        _LOG.warning(f"Compiled programs are not kept: {error}. Name another folder, or `off`, in {VARIABLE}.")
        return
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    set_persistent_cache(_active)


def loaded_notice() -> str:
    """What was loaded since the last call, as one line; empty if nothing was."""
    count = 0 if _active is None else _active.take_count()
    return f"Loaded {count} compiled program{'s' * (count > 1)} from {_active.folder}." if _active and count else ""


class CompilationCache:
    """Entries of JAX's compilation cache, one file each, with a digest; the modification time is that of the last use.

    Several processes and threads may use a folder at once: an entry appears and disappears as a whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._path = folder  # JAX logs `_path`
        self._bytes = MOST_BYTES  # of all entries; the first `put` counts them
        self._loaded, self._is_writable, self._lock = 0, True, threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The entry; None if there is none, or if it is damaged."""
        config: Any = jax.config
        if config.jax_compilation_cache_dir:  # configured since: JAX uses that one from here on
            _stop()
            return None
        path = self.folder / key
        try:
            content = path.read_bytes()
        except OSError:  # there is none, or it cannot be read: it is compiled, and `put` reports what is wrong
            return None
        digest, value = content[:_DIGEST], content[_DIGEST:]
        if digest != _digest(key, value):
            return None
        with contextlib.suppress(OSError):  # in a folder that is read-only, nothing is deleted either
            os.utime(path)
        with self._lock:
            self._loaded += 1
        return value

    def take_count(self) -> int:
        """How many entries were loaded since the last call."""
        with self._lock:
            count, self._loaded = self._loaded, 0
        return count

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry; after a failure, such as a full disk, no more are written."""
        if not self._is_writable:
            return
        content = _digest(key, value) + value
        try:
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=_NEW)
            try:
                with open(handle, "wb") as file:
                    file.write(content)
                os.replace(name, self.folder / key)
            except BaseException:
                os.unlink(name)
                raise
            with self._lock:
                self._bytes += len(content)
                if self._bytes > MOST_BYTES:
                    self._bytes = self._prune()
        except OSError as error:
            self._is_writable = False
            _LOG.warning(f"No more compiled programs are kept in {self.folder}: {error}.")

    def _prune(self) -> int:
        """Deletes what was not used for longest until the folder is small enough; returns its size."""
        entries = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                found = entry.stat(follow_symlinks=False)
                used = found.st_mtime_ns
                if entry.name.startswith(_NEW):
                    if used / 1e9 > time.time() - 3600:  # another process is writing it
                        continue
                    used = 0  # of a process that was killed while it wrote: deleted in any case
                entries.append((used, found.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        aim = total if total <= MOST_BYTES else MOST_BYTES * 3 // 4  # not again for each entry from here on
        for used, size, path in sorted(entries):
            if used and total <= aim:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()


def _check_private(folder: Path) -> None:
    """Creates the folder. It holds machine code: one that others can write to would let them run code as this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise PermissionError(f"{folder} belongs to another user, or others can write to it (chmod 700)")


def _stop() -> None:
    """Empties JAX's slot, as it was before."""
    global _active, _tried
    config: Any = jax.config
    if _active is not None and persistent_cache() is _active:
        set_persistent_cache(None)
        if config.jax_persistent_cache_min_compile_time_secs == MIN_SECONDS:
            config.update("jax_persistent_cache_min_compile_time_secs", _JAX_MIN_SECONDS)
    _active = _tried = None


_chosen: str | None = None
_active: CompilationCache | None = None
_tried: Path | None = None  # the last folder: what is wrong with it is reported once
