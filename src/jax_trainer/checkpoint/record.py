"""`checkpoint.json`: the metadata of a checkpoint, as JSON that is validated when read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from jax_trainer.checkpoint.errors import CheckpointError, UnknownFormatError
from jax_trainer.checkpoint.files import read_bounded, shown
from jax_trainer.checkpoint.json_codec import PLAIN, NotPlainError, decoded, encoded
from jax_trainer.config.settings import AtLeast, expected, fits, hints_of
from jax_trainer.datasets import Position

RECORD = "checkpoint.json"
FORMAT = 3  # 2: other names, see `_from_format_2`; the history of metrics in the record
FORMATS = (2, FORMAT)  # that can be read
MAX_BYTES = 1 << 26
_PACKAGES = ("jax-trainer", "jax", "flax", "optax", "orbax-checkpoint", "numpy")

_RENAMED = {  # keys of format 2, by their earlier names
    "feed_state": "data_state",
    "judged_step": "evaluated_step",
    "meter": "metrics_state",
}

Count = Annotated[int, AtLeast(0)]
_RUN = {  # types of the known keys in `run`; the loop validates its own state
    "loop": dict[str, object],  # unchecked here: states of random generators have 128-bit integers
    "record": Annotated[int | None, AtLeast(0)],  # bytes of metrics.jsonl
    "unwritten": list[str],  # rows after that, which were not written because the disk was full
    "devices": Annotated[int, AtLeast(1)],
    "key": list[object],  # the words of the root key
    "transforms": str,  # description of the transforms of batches on the device
}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: its step, its position in the data and its metrics."""

    step: int
    position: Position
    metrics: Mapping[str, float]
    path: Path
    callbacks: Mapping[str, Any] = field(default_factory=dict)  # the results of `state_dict`, by name
    without: Sequence[str] = ()  # omitted fields of the state
    run: Mapping[str, Any] = field(default_factory=dict)  # other state of the run

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 1."""
        return self.position.epoch


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `checkpoint.json`. Unknown keys and other types are refused.

    `data_state`, `callbacks` and `run` are stored encoded (see `json_codec.py`). Keys with an empty default are
    optional, and omitted if empty.
    """

    format: int = FORMAT
    step: Count
    epoch: Count
    epoch_step: Count
    data_state: object
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    empty: dict[str, tuple[str, list[Count]]]  # dtype and shape of empty arrays, which orbax refuses
    versions: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)  # the implementation of each typed key; its key data is stored
    callbacks: dict[str, object] = field(default_factory=dict)
    run: dict[str, object] = field(default_factory=dict)
    without: list[Literal["opt_state"]] = field(default_factory=list)
    frozen: str = field(default_factory=str)  # digest of the arrays that are not saved, such as the base of LoRA

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
        """The record of a state that is about to be saved; a copy of its arguments."""
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
        """A copy with other state of the run."""
        return replace(self, run=_named_states(run, "run", "The state of the run", "It"))

    def text(self) -> str:
        """The record as JSON."""
        content = {name: value for name, value in vars(self).items() if value or name in _required()}
        try:
            text = json.dumps(content, allow_nan=False, indent=1)
        except RecursionError as error:  # only possible for a record that another program wrote
            raise CheckpointError(f"The record of step {self.step} is nested too deeply.") from error
        if len(text) > MAX_BYTES:
            raise CheckpointError(
                f"The metadata of the checkpoint has {len(text)} bytes, more than the limit of {MAX_BYTES}. "
                f"{self._largest()}: store less there."
            )
        return text

    def _largest(self) -> str:
        states = {f"The state of the callback {shown(name)}": state for name, state in self.callbacks.items()}
        sizes = {name: len(json.dumps(state)) for name, state in states.items()}
        sizes["The state of the data"] = len(json.dumps(self.data_state))
        sizes["The state of the run"] = len(json.dumps(self.run))
        largest = max(sizes, key=sizes.__getitem__)
        return f"{largest} alone has {sizes[largest]}"

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Reads the record in `folder`; errors start with the path."""
        try:
            text = read_bounded(folder / RECORD, MAX_BYTES)
            content = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: {RECORD} cannot be read: {error}.") from error
        if isinstance(content, dict) and type(found := content.get("format")) is int and found not in FORMATS:
            raise UnknownFormatError(
                f"{folder} was written in format {found}, and this version of jax-trainer reads the formats "
                f"{' and '.join(map(str, FORMATS))}. Use the version that wrote it, or another folder."
            )
        if isinstance(content, dict) and content.get("format") == 2:
            content = _from_format_2(content)
        if problem := _does_not_fit(content):
            raise CheckpointError(f"{folder}: {RECORD} is invalid: {problem}.")
        return cls(**content)

    def saved(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in `folder`, from which this record was read."""
        try:
            data_state = decoded(self.data_state)
            callbacks, run = (
                {name: decoded(state) for name, state in states.items()} for states in (self.callbacks, self.run)
            )
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: {RECORD} is invalid: {error}.") from error
        known = {name: value for name, value in run.items() if name in _RUN}
        if problem := "; ".join(_misfits(known, _RUN)):
            raise CheckpointError(f"{folder}: {RECORD} is invalid: in run, {problem}.")
        position = Position(self.epoch, self.epoch_step, data_state)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return SavedCheckpoint(self.step, position, metrics, folder, callbacks, tuple(self.without), run)


def _from_format_2(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record of format 2 with today's names; keys that it may lack get their old meaning."""
    new = {_RENAMED.get(name, name): value for name, value in content.items()}
    run = new.get("run")
    if isinstance(run, dict) and isinstance(run.get("loop"), dict):
        loop = {_RENAMED.get(name, name): value for name, value in run["loop"].items()}
        new["run"] = {**run, "loop": {"edits": [], **loop}}  # edits of callbacks came later: there were none
    return {**new, "format": FORMAT}


def _data_state(state: Any) -> Any:
    try:
        return encoded(state, "the state of the data")
    except NotPlainError as problem:
        raise CheckpointError(
            f"The position in the data cannot be saved: {problem}. A loader that keeps its own position must return "
            f"it as {PLAIN}."
        ) from problem


def _named_states(states: Mapping[str, Any] | None, where: str, what: str, which: str) -> dict[str, Any]:
    try:
        if odd := [key for key in states or {} if type(key) is not str]:
            raise NotPlainError(f"{where} has the key {shown(odd[0])}, of type {type(odd[0]).__name__}")
        return {name: encoded(state, f"{where}[{name!r}]") for name, state in (states or {}).items()}
    except NotPlainError as problem:
        raise CheckpointError(f"{what} cannot be saved: {problem}. {which} may contain {PLAIN}.") from problem


def _number(name: str, value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The metric {name!r} is {shown(value)}, not a scalar. Save only scalars with a checkpoint."
        ) from error
    return number if math.isfinite(number) else str(number)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{shown(digits)} is not a finite number")
    return number


@cache
def _required() -> frozenset[str]:
    return frozenset(item.name for item in fields(Record) if item.default_factory is MISSING)


def _does_not_fit(content: Any) -> str:
    if not isinstance(content, dict):
        return f"it has a {type(content).__name__}, not an object"
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
    """The versions of the packages that write checkpoints; cached, because the lookup is slow."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # jax-trainer itself, run from a source tree
            continue
    return found
