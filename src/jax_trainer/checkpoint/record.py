"""`checkpoint.json`: all that a checkpoint says besides its arrays, in plain JSON that is checked when it is read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.untrusted import read_bounded
from jax_trainer.datasets import Position
from jax_trainer.settings import AtLeast, expected, fits, hints_of

RECORD = "checkpoint.json"
FORMAT = 1
MAX_BYTES = 1 << 20
_PLAIN = "text, finite numbers, true, false, None, and lists and dicts of these"
_PACKAGES = ("jax-trainer", "jax", "flax", "optax", "orbax-checkpoint", "numpy")

Count = Annotated[int, AtLeast(0)]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or is not there."""


class UnknownFormatError(CheckpointError):
    """A checkpoint that another version of this library wrote, in a way that this one does not know."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there: which step it holds, where in the data that was, and what was measured then."""

    step: int
    position: Position
    metrics: Mapping[str, float]
    path: Path
    callbacks: Mapping[str, Any] = field(default_factory=dict)  # what their `state_dict` gave, by their names
    without: Sequence[str] = ()  # the fields of the state that were left out

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 1."""
        return self.position.epoch


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `checkpoint.json`. Other keys, and other types, are not accepted.

    A key with a default that is empty is not written where there is nothing to say, and need not be there.
    """

    format: int = FORMAT
    step: Count
    epoch: Count
    epoch_step: Count
    feed_state: Any
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    empty: dict[str, tuple[str, list[Count]]]  # dtype and shape of the arrays without content, which orbax refuses
    versions: dict[str, str]
    callbacks: dict[str, Any] = field(default_factory=dict)
    without: list[Literal["opt_state"]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        step: int,
        position: Position,
        metrics: Mapping[str, float],
        empty: Mapping[str, tuple[str, tuple[int, ...]]],
        callbacks: Mapping[str, Any] | None = None,
    ) -> "Record":
        """What is to be said about a state that is about to be saved."""
        if problem := not_plain(position.state, "the state of the data"):
            raise CheckpointError(
                f"The position in the data cannot be saved: {problem}. A loader that keeps its own position must give "
                f"it as {_PLAIN}."
            )
        if problem := not_plain(held := dict(callbacks or {}), "callbacks"):
            raise CheckpointError(
                f"The state of a callback cannot be saved: {problem}. A `state_dict` may hold {_PLAIN}."
            )
        return cls(
            step=step,
            epoch=int(position.epoch),
            epoch_step=int(position.epoch_step),
            feed_state=position.state,
            metrics={name: _number(name, value) for name, value in metrics.items()},
            empty={name: (dtype, list(shape)) for name, (dtype, shape) in empty.items()},
            versions=_versions(),
            callbacks=held,
        )

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
        sizes["The state of the data"] = len(json.dumps(self.feed_state))
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

    def saved(self, folder: Path) -> Saved:
        """The checkpoint in `folder`, which this was read from."""
        position = Position(self.epoch, self.epoch_step, self.feed_state)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return Saved(self.step, position, metrics, folder, self.callbacks, tuple(self.without))


def not_plain(value: Any, where: str, depth: int = 0) -> str:
    """What in `value` would not come back from JSON as it was; "" if all of it would."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return ""
    if not isinstance(value, list | dict):
        return f"{where} is {shown(value)}, of type {type(value).__name__}"
    if depth > 100:
        return f"{where} is nested too deeply"
    if isinstance(value, list):
        inner = ((item, f"{where}[{index}]") for index, item in enumerate(value))
    elif odd := [key for key in value if type(key) is not str]:
        return f"{where} has the key {shown(odd[0])}, of type {type(odd[0]).__name__}"
    else:
        inner = ((item, f"{where}[{shown(key)}]") for key, item in value.items())
    return next((problem for item, place in inner if (problem := not_plain(item, place, depth + 1))), "")


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
    wrong = [name for name, value in content.items() if not fits(hints[name], value)]
    return "; ".join(f"{name} must be {expected(hints[name])}, is {shown(content[name])}" for name in sorted(wrong))


@cache
def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # ours, from a source tree
            continue
    return found
