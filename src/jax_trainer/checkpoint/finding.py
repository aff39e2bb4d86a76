"""Finds a run by its configuration."""

import os
import re
from itertools import zip_longest
from pathlib import Path

from jax_trainer.checkpoint.lock import LOCK
from jax_trainer.checkpoint.untrusted import read_bounded

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_MAX_BYTES = 1 << 24  # of a configuration


def newest_with_config(parent: Path, text: str) -> Path | None:
    """The last folder by name in `parent` whose configuration is exactly `text`."""
    alike = [folder for folder in folders_in(parent) if config_in(folder) == text]
    return max(alike, key=lambda folder: _by_number(folder.name), default=None)


def check_config(folder: Path, text: str) -> None:
    """Raises a `ValueError` with the first difference unless the configuration in `folder` is `text`."""
    found = config_in(folder)
    if found == text:
        return
    if found is None:
        raise ValueError(f"{folder / CONFIG} cannot be read: it must be a regular file.")
    pairs = zip_longest(found.splitlines(), text.splitlines(), fillvalue="(nothing)")
    lines = enumerate(pairs, start=1)
    number, (old, new) = next(((number, pair) for number, pair in lines if pair[0] != pair[1]), (0, ("", "")))
    raise ValueError(
        f"The run in {folder} has another configuration: line {number} of its {CONFIG} is {old.strip()!r}, and this "
        f"run has {new.strip()!r}. Choose another version, or resume that run with `jax-trainer resume {folder}`."
    )


def is_unused(folder: Path) -> bool:
    """Whether no run has started in `folder`; it may already be claimed for one."""
    entries = {entry.name: entry for entry in os.scandir(folder)}
    checkpoints = entries.pop(CHECKPOINTS, None)
    is_empty = checkpoints is None or (checkpoints.is_dir(follow_symlinks=False) and not os.listdir(checkpoints.path))
    return is_empty and not entries.keys() - {LOCK}


def config_in(folder: Path) -> str | None:
    """The configuration of the run in `folder`; None if it cannot be read."""
    try:
        return read_bounded(folder / CONFIG, _MAX_BYTES)
    except (ValueError, OSError):
        return None


def folders_in(folder: Path) -> list[Path]:
    """The folders in `folder`, without links; empty if it cannot be read."""
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Sort key with `20261115-142311-10` after `20261115-142311-2`."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]
