"""Which checkpoints a folder holds, and what else is in it."""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jax_trainer.checkpoint.record import CheckpointError, Record, Saved, UnknownFormatError

OLD = ".old"  # of a checkpoint whose step is being saved again
_NAME = re.compile(r"step_([0-9]{8,18})(\.old)?")
_log = logging.getLogger("jax_trainer")


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


@dataclass(frozen=True)
class Listing:
    """The whole checkpoints by step, from the first on, and the folders of those that were saved again since."""

    found: dict[int, Saved]
    replaced: list[Path]


class Catalogue:
    """The checkpoints in `folder`. What is none is left alone, and told of once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[str] = set()

    def scan(self) -> Listing:
        """What is there now."""
        current: dict[int, Saved] = {}
        old: dict[int, Saved] = {}
        strays: dict[str, str] = {}
        for name in sorted(os.listdir(self._folder)) if self._folder.is_dir() else ():
            if name.startswith("."):  # on its way in or out, or none of our business
                continue
            try:
                saved = self._read(name)
                (old if name.endswith(OLD) else current)[saved.step] = saved
            except UnknownFormatError:
                raise  # to overlook it would be to begin again
            except CheckpointError as error:
                strays[name] = str(error)
        self._tell(strays)
        found = dict(sorted({**old, **current}.items()))
        return Listing(found, [old[step].path for step in old if step in current])

    def _read(self, name: str) -> Saved:
        path, match = self._folder / name, _NAME.fullmatch(name)
        if not match or name_of(int(match[1])) + (match[2] or "") != name:
            raise CheckpointError(f"{path} does not have the name of a checkpoint.")
        return read_saved(path)[0]

    def _tell(self, strays: dict[str, str]) -> None:
        reasons = [reason for name, reason in strays.items() if name not in self._told]
        self._told |= strays.keys()
        if reasons:
            _log.warning("This is no checkpoint, and is left alone: %s", " ".join(reasons[:10]))


def read_saved(path: Path) -> tuple[Saved, Record]:
    """The checkpoint in the folder `path`, whose name must be that of its step, and its record."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    record = Record.read(path)
    if path.name not in (name_of(record.step), name_of(record.step) + OLD):
        raise CheckpointError(f"{path} says that it is of step {record.step}.")
    return record.saved(path), record
