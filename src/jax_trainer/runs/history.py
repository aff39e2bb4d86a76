"""The metrics of a run so far: training by epoch, every validation, the test, and how the run ended.

They are appended to `history.jsonl` in the run folder, one line each, before a checkpoint is committed that refers to
them: it has the number of lines, and their digest. The file is only ever appended to. A run that resumes at an earlier
line appends `{"back": n}`, so the lines of every checkpoint stay as they were.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jax_trainer.callbacks import full_names
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.json_codec import PLAIN, NotPlainError, decoded, encoded
from jax_trainer.config.settings import AtLeast, checked, hints_of
from jax_trainer.core import failpoint
from jax_trainer.diagnostics.files import LineFile
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.engine import EpochEnd, EvalEnd, EvalRoundEnd, Event, FitEnd, Status

HISTORY = "history.jsonl"
TEST = "test"
_NOT_OF_THE_MODEL = ("optimizer/", "guard/")  # prefixes of metrics
_BACK = "back"
_ENTRY = {"kind": str, "epoch": int, "step": int, "metrics": dict[str, Any]}
_MOST_KEYS = 10  # of those that a message lists
_log = logging.getLogger("jax_trainer")
Key = TypeVar("Key")


class MetricDict(dict[str, Any]):
    """Metrics by name; an unknown name is an error that lists the reported ones."""

    def __missing__(self, name: str) -> Any:
        sets = {one.partition("/")[0] for one in self}
        same = [one for one in self if one.endswith(f"/{name}")]  # such as "loss"
        hint = f" Did you mean `{same[0]}`?" if same else suggestion(str(name), self)
        if str(name).startswith("val") and "train" in sets and not any(one.startswith("val") for one in sets):
            hint = " This epoch has no validation: take one that has, or pass `val_loader` (to `fit`: `test_ds`)."
        raise KeyError(f"No metric {name!r} was reported.{hint} Reported: {', '.join(sorted(self)) or 'none'}.")


class ResultDict(dict[Key, dict[str, Any]]):
    """Metrics by epoch; an unknown key is an error that lists the known ones."""

    def __missing__(self, key: Any) -> Any:
        known = [repr(one) for one in self]
        listed = ", ".join(known if len(known) <= _MOST_KEYS else [known[0], "…", *known[-2:]]) or "none"
        hint = " There was no test: pass `test_loader` to `train_model`." if key == TEST else ""
        name = next((name for one in self.values() for name in one if name.endswith("/loss")), "train/loss")
        raise KeyError(
            f"No results for {key!r}.{hint} They are by epoch: {listed}. The metrics of one: "
            f"`results[epoch][{name!r}]`; in all of them: `[one[{name!r}] for one in results.values()]`."
        )


for _kind_of_dict in (MetricDict, ResultDict):  # JAX takes a subclass of dict for a leaf
    jax.tree_util.register_pytree_node(
        _kind_of_dict,
        lambda metrics: (tuple(metrics.values()), tuple(metrics)),
        lambda keys, values, kind=_kind_of_dict: kind(zip(keys, values, strict=True)),
    )


class Validation(NamedTuple):
    """One validation: its epoch, step and metrics."""

    epoch: int
    step: int
    metrics: dict[str, Any]


class History:
    """Collects the metrics of a run by full name.

    Args:
        file: the file of the metrics, of which checkpoints have the length; None: they are in memory only.
        keeps_training: also keep the training metrics of every epoch.
        writes: whether this process writes the file.
    """

    def __init__(self, file: Path | None = None, *, keeps_training: bool = True, writes: bool = True) -> None:
        self._keeps_training = keeps_training
        self.status: Status = "failed"
        self.reason = ""
        self._file, self._writes = None if file is None else LineFile(file), file is not None and writes
        self._guard = threading.Lock()  # of the lines, which the saving thread writes
        self._new: list[dict[str, Any]] = []  # entries that are not encoded yet
        self._unwritten: list[bytes] = []
        self._count, self._hash = 0, hashlib.sha256()  # of all lines
        self._is_read = False
        self._clear()

    def _clear(self) -> None:
        self.training: dict[int, dict[str, Any]] = {}  # by epoch
        self.validations: list[Validation] = []
        self.tests: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        """Adds the metrics of `event`."""
        match event:
            case EpochEnd() if self._keeps_training:
                self._record("train", event.epoch, event.step, full_names(event.metrics, "train"))
            case EvalEnd():
                metrics = full_names(event.metrics, event.name)
                self._record(_kind([event.name]), event.epoch, event.step, metrics)
            case FitEnd():
                self.status, self.reason = event.status, event.reason

    def add(self, event: EvalRoundEnd, metrics: Mapping[str, Any]) -> None:
        """Adds metrics that a hook has computed to those of an evaluation."""
        self._record(_kind(event.metrics), event.epoch, event.step, metrics)

    def by_epoch(self) -> dict[int, dict[str, Any]]:
        """The metrics of training and of the last validation of every epoch."""
        epochs = {epoch: dict(metrics) for epoch, metrics in self.training.items()}
        for epoch, metrics in self.validated().items():
            epochs[epoch] = {**epochs.get(epoch, {}), **metrics}
        return dict(sorted(epochs.items()))

    def validated(self) -> dict[int, dict[str, Any]]:
        """The metrics of the last validation of every epoch that has one."""
        epochs: dict[int, dict[str, Any]] = {}
        for epoch, _, metrics in self.validations:
            epochs[epoch] = {**epochs.get(epoch, {}), **metrics}
        return epochs

    def final(self) -> dict[str, float]:
        """The scalar metrics of the last epoch and of the test, without those of the optimizer."""
        epochs = self.by_epoch()
        last = {**(epochs[max(epochs)] if epochs else {}), **self.tests}
        return {
            name: float(value)
            for name, value in last.items()
            if np.ndim(value) == 0 and not name.startswith(_NOT_OF_THE_MODEL)
        }

    def state_dict(self) -> dict[str, Any]:
        """The number of lines so far, and their digest; `write` must follow before a checkpoint is committed."""
        if self._file is None or not self._writes:
            return {}
        if not self._is_read:
            self._resume(_read(self._file), 0)
        new, self._new = self._new, []
        for entry in new:
            try:
                self._add_line(entry)
            except NotPlainError as problem:
                text = f"The metrics of the run cannot be saved: {problem}. They may contain {PLAIN}."
                raise CheckpointError(text) from problem
        return {"lines": self._count, "digest": self._hash.hexdigest()}

    def write(self) -> None:
        """Appends all lines so far to the file, and waits until they are on disk; repeated after a failure."""
        with self._guard:
            if self._file is not None and self._unwritten:
                self._file.append(self._unwritten, sync=True)
                self._unwritten = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the metrics that the result of `state_dict` refers to. A damaged file costs them, with a warning."""
        self._clear()
        checked(state, {"lines": Annotated[int, AtLeast(0)], "digest": str})
        if self._file is None:
            return
        found = _read(self._file)
        kept = found[: state["lines"]]
        if len(kept) < state["lines"] or _digest(kept).hexdigest() != state["digest"]:
            _log.warning(
                "%s is missing or damaged: the metrics of the first %d lines are lost. Training is not affected.",
                *(self._file.path, state["lines"]),
            )
            kept = []
        for entry in _entries(kept):
            self._apply(entry["kind"], entry["epoch"], entry["step"], entry["metrics"])
        if self._writes:
            self._new = []
            self._resume(found, len(kept))

    def _resume(self, found: list[bytes], kept: int) -> None:
        """Continues after the first `kept` lines of the file, whose lines are `found`."""
        with self._guard:
            self._unwritten, self._is_read = [], True
            self._count, self._hash = len(found), _digest(found)
        if kept < len(found):
            self._add_line({_BACK: kept})

    def _add_line(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(encoded(entry, "the entry")) + "\n").encode()
        with self._guard:
            self._unwritten.append(line)
            self._count += 1
            self._hash.update(line)

    def _record(self, kind: str, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        self._apply(kind, epoch, step, metrics)
        if self._writes:
            self._new.append({"kind": kind, "epoch": epoch, "step": step, "metrics": dict(metrics)})

    def _apply(self, kind: str, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        if kind == "train":
            self.training[epoch] = dict(metrics)
        elif kind == TEST:
            self.tests = {**self.tests, **metrics}
        else:
            # several sets, and metrics that hooks add, are one validation
            if not self.validations or self.validations[-1][:2] != (epoch, step):
                self.validations.append(Validation(epoch, step, {}))
            self.validations[-1] = Validation(epoch, step, {**self.validations[-1].metrics, **metrics})


def _kind(names: Any) -> str:
    return TEST if all(name.startswith(TEST) for name in names) else "val"


def _read(file: LineFile) -> list[bytes]:
    try:
        return file.read()
    except ValueError:  # no regular file
        return []


def _digest(lines: list[bytes]) -> Any:
    return hashlib.sha256(b"".join(lines))


def _entries(lines: list[bytes]) -> Iterator[Mapping[str, Any]]:
    """The entries of these lines, without those that a resumed run went back behind."""
    kept: list[tuple[int, Any]] = []
    for number, line in enumerate(lines):
        entry = json.loads(line)
        if _BACK in entry:
            kept = [one for one in kept if one[0] < entry[_BACK]]
        else:
            kept.append((number, entry))
    return (checked(decoded(entry), _ENTRY) for _, entry in kept)


EVALUATIONS = "evaluations.jsonl"
_MAX_BYTES = 1 << 28
Number = float | Literal["nan", "inf", "-inf"]  # JSON has neither NaN nor infinities


class EvaluationRecordError(ValueError):
    """The record of evaluations cannot be read, or another process writes it."""


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one checkpoint.

    Args:
        step, epoch: of the checkpoint.
        sets: names of the evaluated sets.
        overrides: changes of the stored configuration for this evaluation, without secrets.
        metrics: scalar metrics by full name; NaN and infinities are strings.
        deleted: whether the checkpoint was deleted before it was read, so that there are no metrics.
    """

    step: Annotated[int, AtLeast(0)]
    epoch: Annotated[int, AtLeast(0)]
    sets: list[str]
    overrides: list[str]
    metrics: dict[str, Number]
    deleted: bool = False


class EvaluationRecord:
    """The evaluations of a run that are recorded so far; see `evaluation_record`."""

    def __init__(self, file: Path) -> None:
        self._file, hints = LineFile(file), hints_of(Evaluation)
        self.all: list[Evaluation] = []
        for number, line in enumerate(self._file.read(_MAX_BYTES), 1):
            try:
                self.all.append(Evaluation(**checked(json.loads(line), hints)))
            except (ValueError, RecursionError) as error:
                text = f"{file}:{number} is not an evaluation: {error}. Move the file elsewhere."
                raise EvaluationRecordError(text) from None

    def missing(self, step: int, sets: Collection[str], overrides: Collection[str]) -> list[str]:
        """Those of the sets on which the checkpoint of this step was not evaluated with these overrides."""
        done = {name for one in self.all if (one.step, one.overrides) == (step, [*overrides]) for name in one.sets}
        return [name for name in sets if name not in done]

    def add(self, one: Evaluation) -> None:
        """Appends an evaluation, and waits until it is on disk."""
        self._file.append([(json.dumps(asdict(one), allow_nan=False) + "\n").encode()], sync=True)
        self.all.append(one)
        failpoint("evaluation")


@contextmanager
def evaluation_record(folder: Path) -> Iterator[EvaluationRecord]:
    """The record of a run folder, to append to; an `EvaluationRecordError` if another process does.

    The lock is that of this file: a training in the folder neither sees nor waits for it.
    """
    file = folder / EVALUATIONS
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"Another process evaluates the checkpoints of {folder}. Wait until it has ended."
            raise EvaluationRecordError(text) from None
        yield EvaluationRecord(file)
    finally:
        os.close(handle)


def json_number(value: float) -> Number:
    """A number as JSON can write it."""
    return value if abs(value) < float("inf") else str(value)  # type: ignore[return-value]  # NaN is not below
