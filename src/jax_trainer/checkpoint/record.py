"""`checkpoint.json`: all that a checkpoint says besides its arrays, in plain JSON that is checked when it is read."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
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

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 1."""
        return self.position.epoch


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `checkpoint.json`. Other keys, and other types, are not accepted."""

    format: int = FORMAT
    step: Count
    epoch: Count
    epoch_step: Count
    feed_state: Any
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    empty: dict[str, tuple[str, list[Count]]]  # dtype and shape of the arrays without content, which orbax refuses
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        step: int,
        position: Position,
        metrics: Mapping[str, float],
        empty: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> "Record":
        """What is to be said about a state that is about to be saved."""
        if problem := not_plain(position.state, "the state of the data"):
            raise CheckpointError(
                f"The position in the data cannot be saved: {problem}. A loader that keeps its own position must give "
                "it as text, finite numbers, true, false, None, and lists and dicts of these."
            )
        return cls(
            step=step,
            epoch=int(position.epoch),
            epoch_step=int(position.epoch_step),
            feed_state=position.state,
            metrics={name: _number(name, value) for name, value in metrics.items()},
            empty={name: (dtype, list(shape)) for name, (dtype, shape) in empty.items()},
            versions=_versions(),
        )

    def text(self) -> str:
        """As JSON."""
        text = json.dumps(asdict(self), allow_nan=False, indent=1)
        if len(text) > MAX_BYTES:
            raise CheckpointError(
                f"What is to be saved besides the arrays has {len(text)} bytes, more than {MAX_BYTES}. The state of "
                f"the data alone has {len(json.dumps(self.feed_state))}: use a loader that keeps a smaller one."
            )
        return text

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """What `folder` says; an error that begins with the path where that makes no sense."""
        try:
            content = json.loads(read_bounded(folder / RECORD, MAX_BYTES), parse_constant=_no_constant)
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
        return Saved(self.step, position, {name: float(value) for name, value in self.metrics.items()}, folder)


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


def _does_not_fit(content: Any) -> str:
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, not an object"
    names, hints = {field.name for field in fields(Record)}, hints_of(Record)
    if odd := sorted(names ^ content.keys()):
        verb = "lacks" if odd[0] in names else "has an unknown"
        return f"it {verb} {shown(odd[0])}"
    wrong = [name for name in names if not fits(hints[name], content[name])]
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
