"""`run.json`: what a run computes (its fingerprint), where it comes from (command, code, packages, machine), and how
each of its starts ended.

It describes the latest start; an entry of `starts` has what changed since the one before. The file is written when a
start begins and when it ends: one that is still `running` in a folder that nobody has locked was killed. It has no
environment variables, and no secrets.
"""

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import yaml

from jax_trainer.checkpoint.folder import RECORD, RunFolder
from jax_trainer.checkpoint.record import versions_in_use
from jax_trainer.config.redaction import HIDDEN, environment_secrets, is_secret, redact, redact_text, secret_values
from jax_trainer.core import TrainState
from jax_trainer.diagnostics.files import read_json, write_atomically
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.runs.fingerprint import facts_in
from jax_trainer.runs.spec import RunSpec
from jax_trainer.runs.target import RunTarget

FORMAT = 2
GIT = "JAX_TRAINER_GIT"  # "off": run.json has no git commit
_GIT_SECONDS = 2.0
_MAX_BYTES = 1 << 24
_MAX_WORDS, _MAX_WORD = 200, 1000  # of a command line
_MAX_CLASSES = 1000
_log = logging.getLogger("jax_trainer")


class Provenance:
    """Writes `run.json` of a run folder; in a process that does not write, it does nothing."""

    def __init__(self, target: RunTarget) -> None:
        self._target = target
        self._record: dict[str, Any] | None = None
        self._coming: Any = None  # the fingerprint of a run that computes something else from its next step on

    def start(self, spec: RunSpec, state: TrainState, step: int, classes: Sequence[str] = ()) -> None:
        """Records that the run starts, or resumes, at `step`; `classes` are the names of the classes of its data."""
        if not self._target.writes or spec.recording is None:
            return
        folder, source = self._target.folder, self._target.resumes
        before = _read(folder)
        fingerprint = None if spec.fingerprint is None else spec.fingerprint.resuming(facts_in(before or {}))
        now: dict[str, Any] = {"command": command_line(), "fingerprint": fingerprint, **_environment(state)}
        if classes:
            now["classes"] = [name[:_MAX_WORD] for name in classes[:_MAX_CLASSES]]
        created = {"format": FORMAT, "created": _now(), "parent": None, "starts": []}
        if self._target.is_fork and source is not None:
            created["parent"] = redact({"run": str(source.path), "step": step})
        changed = _changes(before, now) if before else {}
        if before and self._target.changes and not self._target.is_fork:  # until the first step
            self._coming, now["fingerprint"] = now["fingerprint"], before.get("fingerprint")
        entry = {"start": _now(), "end": None, "status": "running", "reason": "", "from_step": step, "step": step}
        kept = {name: before[name] for name in created if name in before} if before else created
        entry |= {"pid": os.getpid(), "changed": changed, "allowed": []}
        self._record = {**kept, **now, "starts": [*kept["starts"], entry]}
        self._write()

    def stepped(self) -> None:
        """Records, with the first step, what the run computes differently from here on."""
        if self._record is not None and self._target.changes and not self._record["starts"][-1]["allowed"]:
            self._record["starts"][-1]["allowed"] = [*map(list, self._target.changes)]
            self._record["fingerprint"] = self._coming or self._record["fingerprint"]
            self._write()

    def end(self, status: str, reason: str, step: int, **summary: Any) -> None:
        """Records how the start ended; `summary` is added to its entry."""
        if self._record is not None:
            reason = redact_text(reason, environment_secrets())[:_MAX_WORD]
            self._record["starts"][-1] |= {"end": _now(), "status": status, "reason": reason, "step": step, **summary}
            self._write()

    def _write(self) -> None:
        file = self._target.folder.path / RECORD
        try:
            write_atomically(file, json.dumps(self._record, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s). Training is not affected.", file, error.strerror)


def _read(folder: RunFolder) -> dict[str, Any] | None:
    """The record of earlier starts; None if there is none. A damaged one is replaced, with a warning."""
    file = folder.path / RECORD
    if not os.path.lexists(file):
        return None
    try:
        record = read_json(file, _MAX_BYTES)
        if not isinstance(record.get("starts"), list) or not all(isinstance(one, dict) for one in record["starts"]):
            raise ValueError(f"{file} has no list of starts")
    except ValueError as error:
        _log.warning("%s is damaged: the record of earlier starts is lost. Training is not affected. %s", file, error)
        return None
    return record


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs from the start before, by dotted key: [before, now]; of the fingerprint, the user's words."""
    known = [{**one, **((one.get("fingerprint") or {}).get("words", {})), "fingerprint": None} for one in (before, now)]
    is_value = lambda one: not isinstance(one, Mapping)
    old, new = (
        {leaf_path(path): value for path, value in jax.tree_util.tree_leaves_with_path(one, is_leaf=is_value)}
        for one in ({name: one.get(name) for name in known[1]} for one in known)
    )
    return {name: [old.get(name), new.get(name)] for name in {**new, **old} if old.get(name) != new.get(name)}


# the command line


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """The command line of this process, or `words`, without secrets: values of secret options, keys and variables.

    >>> command_line(["train.py", "--api-key", "hunter2", "logger.token=hunter2", "note=hunter2", "lr=0.1"])
    ['train.py', '--api-key', '<hidden>', 'logger.token=<hidden>', 'note=<hidden>', 'lr=0.1']
    """
    words = list(sys.argv if words is None else words)[:_MAX_WORDS]
    if words and Path(words[0]).name == "__main__.py" and Path(words[0]).parent.name == "jax_trainer":
        words[0] = "jax-trainer"
    shown, known, hides_next = [], set(environment_secrets()), False
    for word in words:
        name, has_value, value = word.partition("=")
        key = name.lstrip("-")
        if hides_next and not word.startswith("-"):
            known |= secret_values(word, "secret")
            word = HIDDEN
        elif has_value and (parsed := _parsed(value)) != (hidden := redact(parsed, key)):
            known |= secret_values(parsed, key)
            word = f"{name}={hidden if isinstance(hidden, str) else json.dumps(hidden)}"
        hides_next = name.startswith("-") and not has_value and is_secret(key)
        shown.append(word)
    return [redact_text(word, known)[:_MAX_WORD] for word in shown]


def _parsed(value: str) -> Any:
    """The value of an override: `dataset={url: …, token: …}` may have secrets inside."""
    try:
        return yaml.safe_load(value) if value[:1] in ("{", "[") else value
    except (yaml.YAMLError, RecursionError, ValueError):
        return value


# code and machine


def _environment(state: TrainState) -> dict[str, Any]:
    leaves = [leaf for leaf in jax.tree.leaves(state.params) if hasattr(leaf, "nbytes")]
    return {
        "parameters": {"count": sum(leaf.size for leaf in leaves), "bytes": sum(leaf.nbytes for leaf in leaves)},
        "git": _git(),
        "packages": versions_in_use(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "devices": _devices(state),
        "processes": jax.process_count(),
    }


def _devices(state: TrainState) -> list[dict[str, Any]]:
    """The devices that hold the state, by kind; the memory of each in bytes, None where JAX does not tell."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in sorted(state.step.sharding.device_set, key=lambda one: one.id):
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    found = []
    for (name, kind), devices in kinds.items():
        local = [one for one in devices if one.process_index == jax.process_index()]
        memory = (local[0].memory_stats() or {}).get("bytes_limit") if local else None
        driver = " ".join(devices[0].client.platform_version.split())[:200]
        found.append({"platform": name, "kind": kind, "count": len(devices), "memory": memory, "driver": driver})
    return found


def _git() -> dict[str, Any] | None:
    """The commit around the user's script or working directory, and a digest of what is not committed.

    None without git, a repository or a commit. `dirty` is "" for a clean tree, and None if that took too long.
    """
    if os.environ.get(GIT, "").lower() in ("0", "off", "false"):
        return None
    deadline = time.monotonic() + _GIT_SECONDS
    folder = _code_folder()
    found = _run_git(folder, deadline, "rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return None
    root, commit = os.fsdecode(found).split("\n")[:2]
    where = Path(root)
    diff = _run_git(where, deadline, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
    new = _run_git(where, deadline, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    if diff is None or new is None:
        return {"commit": commit, "dirty": None}
    for name in sorted(filter(None, new.split(b"\0"))):
        file = where / os.fsdecode(name)
        if file.is_file() and not file.is_symlink() and time.monotonic() < deadline:
            diff += b"\0" + name + b"\0" + file.read_bytes()
    return {"commit": commit, "dirty": hashlib.sha256(diff).hexdigest() if diff else ""}


def _code_folder() -> Path:
    """The folder of the user's script; the working directory for `jax-trainer`, other tools, and notebooks."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return Path.cwd()
    file = Path(script).resolve()
    tools = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[1]]
    is_tool = not file.is_file() or any(file.is_relative_to(folder) for folder in tools)
    return Path.cwd() if is_tool else file.parent


def _run_git(folder: Path, deadline: float, *words: str) -> bytes | None:
    """What git prints; None if it is not installed, fails, or is not done in time."""
    options = ("-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", *options, *words]
    left = max(deadline - time.monotonic(), 0.01)
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, timeout=left, check=True, **quiet)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
