"""`evaluations.jsonl`: the checkpoints of a run that `jax-trainer eval` has evaluated, one JSON object per line.

A line is on disk before the next checkpoint is read. The part of a line that a killed process leaves is cut off by the
next one, which evaluates that checkpoint again.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from jax_trainer.config.settings import AtLeast, checked, hints_of
from jax_trainer.core import failpoint
from jax_trainer.diagnostics.files import LineFile

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
