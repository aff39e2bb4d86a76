"""`checkpoint.json`: all that a checkpoint says besides its arrays, in JSON that is checked when it is read."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from jax_trainer.checkpoint.disk import CheckpointError
from jax_trainer.checkpoint.json_codec import PLAIN, decoded, encoded, not_named, not_plain
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.untrusted import read_bounded
from jax_trainer.datasets import Position
from jax_trainer.settings import AtLeast, expected, fits, hints_of

RECORD = "checkpoint.json"
FORMAT = 2
MAX_BYTES = 1 << 26
_PACKAGES = ("jax-trainer", "jax", "flax", "optax", "orbax-checkpoint", "numpy")

Count = Annotated[int, AtLeast(0)]
_RUN = {  # what the styles have a run remember, where they do; the loop itself knows what its own state is
    "loop": dict[str, object],  # anything in it: numbers of random generators have 128 bits
    "record": Annotated[int | None, AtLeast(0)],  # bytes of metrics.jsonl
    "unwritten": list[str],  # rows behind that, for which there was no room
    "devices": Annotated[int, AtLeast(1)],
    "key": list[object],  # the words of the root key
    "transforms": str,  # of batches on the device, in words
}


@contextmanager
def damage(folder: Path, what: str) -> Iterator[None]:
    """What goes wrong while `what` of the record in `folder` is put to use is damage to that checkpoint."""
    try:
        yield
    except Exception as error:  # of whatever type: the data is not what whoever reads it has written
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(f"{folder}: {RECORD} is not that of a checkpoint: {what}: {text}.") from error


class UnknownFormatError(CheckpointError):
    """A checkpoint that another version of this library wrote, in a way that this one does not know."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is there: which step it holds, where in the data that was, and what was measured then."""

    step: int
    position: Position
    metrics: Mapping[str, float]
    path: Path
    callbacks: Mapping[str, Any] = field(default_factory=dict)  # what their `state_dict` gave, by their names
    without: Sequence[str] = ()  # the fields of the state that were left out
    run: Mapping[str, Any] = field(default_factory=dict)  # what else the run had to remember

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 1."""
        return self.position.epoch


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `checkpoint.json`. Other keys, and other types, are not accepted.

    `data_state`, `callbacks` and `run` are held as they are written (see `plain.py`). A key with a default that is
    empty is not written where there is nothing to say, and need not be there.
    """

    format: int = FORMAT
    step: Count
    epoch: Count
    epoch_step: Count
    data_state: object
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    empty: dict[str, tuple[str, list[Count]]]  # dtype and shape of the arrays without content, which orbax refuses
    versions: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)  # the implementation of each typed key, stored as its words
    callbacks: dict[str, object] = field(default_factory=dict)
    run: dict[str, object] = field(default_factory=dict)
    without: list[Literal["opt_state"]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        step: int,
        position: Position,
        metrics: Mapping[str, float],
        empty: Mapping[str, tuple[str, tuple[int, ...]]],
        callbacks: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> "Record":
        """What is to be said about a state that is about to be saved. Nothing of it changes with what was given."""
        return cls(
            step=step,
            epoch=int(position.epoch),
            epoch_step=int(position.epoch_step),
            data_state=_data_state(position.state),
            metrics={name: _number(name, value) for name, value in metrics.items()},
            empty={name: (dtype, list(shape)) for name, (dtype, shape) in empty.items()},
            versions=versions_in_use(),
            keys=dict(keys or {}),
            callbacks=_named_states(callbacks, "callbacks", "The state of a callback", "A `state_dict`"),
        )

    def with_run(self, run: Mapping[str, Any] | None) -> "Record":
        """The same, with what else the run has to remember."""
        return replace(self, run=_named_states(run, "run", "What the run has to remember", "It"))

    def text(self) -> str:
        """As JSON."""
        content = {name: value for name, value in vars(self).items() if value or name in _required()}
        try:
            text = json.dumps(content, allow_nan=False, indent=1)
        except RecursionError as error:  # not of what is saved, which was checked, but of what somebody else wrote
            raise CheckpointError(f"The record of step {self.step} is nested too deeply.") from error
        if len(text) > MAX_BYTES:
            raise CheckpointError(
                f"What is to be saved besides the arrays has {len(text)} bytes, more than {MAX_BYTES}. "
                f"{self._largest()}: keep less there."
            )
        return text

    def _largest(self) -> str:
        states = {f"The state of the callback {shown(name)}": state for name, state in self.callbacks.items()}
        sizes = {name: len(json.dumps(state)) for name, state in states.items()}
        sizes["The state of the data"] = len(json.dumps(self.data_state))
        sizes["What the run has to remember"] = len(json.dumps(self.run))
        largest = max(sizes, key=sizes.__getitem__)
        return f"{largest} alone has {sizes[largest]}"

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """What `folder` says; an error that begins with the path where that makes no sense."""
        try:
            text = read_bounded(folder / RECORD, MAX_BYTES)
            content = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: {RECORD} cannot be read: {error}.") from error
        if isinstance(content, dict) and type(found := content.get("format")) is int and found != FORMAT:
            raise UnknownFormatError(
                f"{folder} was written in format {found}, and this version of jax-trainer knows format {FORMAT}. "
                "Use the version that wrote it, or another folder."
            )
        if problem := _does_not_fit(content):
            raise CheckpointError(f"{folder}: {RECORD} is not that of a checkpoint: {problem}.")
        return cls(**content)

    def saved(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in `folder`, which this was read from."""
        try:
            data_state = decoded(self.data_state)
            callbacks, run = (
                {name: decoded(state) for name, state in held.items()} for held in (self.callbacks, self.run)
            )
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: {RECORD} is not that of a checkpoint: {error}.") from error
        known = {name: value for name, value in run.items() if name in _RUN}
        if problem := "; ".join(_misfits(known, _RUN)):
            raise CheckpointError(f"{folder}: {RECORD} is not that of a checkpoint: in run, {problem}.")
        position = Position(self.epoch, self.epoch_step, data_state)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return SavedCheckpoint(self.step, position, metrics, folder, callbacks, tuple(self.without), run)


def _data_state(state: Any) -> Any:
    if problem := not_plain(state, "the state of the data"):
        raise CheckpointError(
            f"The position in the data cannot be saved: {problem}. A loader that keeps its own position must give "
            f"it as {PLAIN}."
        )
    return encoded(state)


def _named_states(states: Mapping[str, Any] | None, where: str, what: str, which: str) -> dict[str, Any]:
    held = dict(states or {})
    problem = not_plain(held, where) or not_named(held, where)
    if problem:
        raise CheckpointError(f"{what} cannot be saved: {problem}. {which} may hold {PLAIN}.")
    return {name: encoded(state) for name, state in held.items()}


def _number(name: str, value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The metric {name!r} is {shown(value)}, which is not one number. Save only numbers with a checkpoint."
        ) from error
    return number if math.isfinite(number) else str(number)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{shown(digits)} is not a finite number")
    return number


@cache
def _required() -> frozenset[str]:
    return frozenset(item.name for item in fields(Record) if item.default_factory is MISSING)


def _does_not_fit(content: Any) -> str:
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, not an object"
    names, hints = {item.name for item in fields(Record)}, hints_of(Record)
    if odd := sorted((_required() - content.keys()) | (content.keys() - names)):
        verb = "lacks" if odd[0] in names else "has an unknown"
        return f"it {verb} {shown(odd[0])}"
    return "; ".join(_misfits(content, hints))


def _misfits(content: Mapping[str, Any], hints: Mapping[str, Any]) -> list[str]:
    wrong = sorted(name for name, value in content.items() if not fits(hints[name], value))
    return [f"{name} must be {expected(hints[name])}, is {shown(content[name])}" for name in wrong]


@cache
def versions_in_use() -> dict[str, str]:
    """The versions of what writes checkpoints; looked up once, because that takes a while."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # ours, from a source tree
            continue
    return found
