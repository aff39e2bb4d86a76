"""`checkpoint.json`: the metadata of a checkpoint, as JSON that is validated when read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from jax_trainer.checkpoint.arrays import Count, PackIndex
from jax_trainer.checkpoint.errors import CheckpointError, UnknownFormatError, damage
from jax_trainer.checkpoint.files import read_json, shown
from jax_trainer.checkpoint.json_codec import PLAIN, NotPlainError, decoded, encoded
from jax_trainer.config.settings import AtLeast, checked, hints_of
from jax_trainer.datasets import Position

RECORD = "checkpoint.json"
FORMAT = 4
_PACKAGES = ("jax-trainer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

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
    versions: dict[str, str]
    small: PackIndex = field(default_factory=dict)  # of the arrays that are packed into one
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
        return json.dumps(content, allow_nan=False, indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Reads the record in `folder`; errors start with the path."""
        with damage(folder):
            content = read_json(folder / RECORD)
            if type(found := content.get("format")) is int and found != FORMAT:
                raise UnknownFormatError(
                    f"{folder} was written in format {found}, and this version of jax-trainer reads format {FORMAT}. "
                    "Use the version that wrote it, or another folder."
                )
            hints = hints_of(Record)
            checked(content, {name: hints[name] for name in hints if name in content or name in _required()})
        return cls(**content)

    def saved(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in `folder`, from which this record was read."""
        with damage(folder):
            data_state = decoded(self.data_state)
            callbacks, run = ({n: decoded(state) for n, state in all.items()} for all in (self.callbacks, self.run))
            checked(known := {name: value for name, value in run.items() if name in _RUN}, {n: _RUN[n] for n in known})
        position = Position(self.epoch, self.epoch_step, data_state)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return SavedCheckpoint(self.step, position, metrics, folder, callbacks, tuple(self.without), run)


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


@cache
def _required() -> frozenset[str]:
    return frozenset(item.name for item in fields(Record) if item.default_factory is MISSING)


@cache
def versions_in_use() -> dict[str, str]:
    """The versions of the packages that a run depends on; cached, because the lookup is slow."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # jax-trainer itself, run from a source tree
            continue
    return found
