"""The command `ckpt`: what a run has saved, and whether it is whole. It reads checkpoints, and builds nothing."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.store import CheckpointInfo, CheckpointStore
from jax_trainer.cli import tables
from jax_trainer.cli.checkpoint_report import CheckpointReport
from jax_trainer.cli.outcomes import Outcome, WrongInput
from jax_trainer.config import ConfigError, config_from, redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import Problems
from jax_trainer.core.output import safe_console
from jax_trainer.trainer import TrainerConfig

_SAVER = "ModelCheckpoint"


def ckpt(asked: argparse.Namespace) -> Outcome:
    """Lists the checkpoints of a run: what was measured, what they take on the disk, and whether they are whole.

    Without `--verify` their names and sizes are looked at; with it, every byte is.
    """
    place = _place(Path(asked.folder).absolute())
    store = CheckpointStore(place.checkpoints)
    everything = store.infos()
    listed = [one for one in everything if place.only in (None, one.path)]
    if place.only is not None and not listed:
        raise WrongInput(f"{place.only} is not a checkpoint. {_offered(everything)}")
    problems = {one.path: one.problem for one in listed}
    if asked.verify:
        problems = {one.path: one.problem or store.verify(one.path) for one in _shown_on_the_way(listed, asked)}
    compared = _comparison(RunFolder(place.checkpoints.parent))
    found = CheckpointReport(listed, problems, _strays(place, everything), verified=asked.verify, **compared)
    run = redact(str(place.path), secrets=asked.secrets)
    return Outcome(
        {"status": "failed" if asked.verify and found.damaged else "completed", "run": run, **found.data()},
        lambda console: tables.checkpoints(console, found.rows(), found.notes()),
        problem=f"{run}: {found.told_damage()}" if asked.verify and found.damaged else "",
    )


@dataclass(frozen=True)
class _Place:
    """Where to look: the folder of checkpoints, and which of them, if only one was asked for."""

    path: Path
    checkpoints: Path
    only: Path | None = None


def _place(path: Path) -> _Place:
    inside = RunFolder(path).checkpoints
    if inside.is_symlink():
        raise WrongInput(f"{inside} is a link. In the folder of a run there are only files and folders.")
    if inside.is_dir():
        return _Place(path, inside)
    if path.is_dir() and path.name == inside.name:
        return _Place(path, path)
    if path.parent.name == inside.name and path.parent.is_dir():
        return _Place(path, path.parent, path)
    try:
        return _Place(path, RunFolder.open(path).checkpoints)  # nothing was saved
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None


def _offered(listed: Sequence[CheckpointInfo]) -> str:
    names = ", ".join(one.path.name for one in listed)
    return f"There are {names}." if names else f"Their names are like {name_of(120)}, and here is none."


def _strays(place: _Place, listed: Sequence[CheckpointInfo]) -> list[str]:
    """What else is there: left alone, and nobody's checkpoint. What has a hidden name is on its way in or out."""
    if place.only is not None or not place.checkpoints.is_dir():
        return []
    known = {one.path.name for one in listed}
    return sorted(name for name in os.listdir(place.checkpoints) if name not in known and not name.startswith("."))


def _shown_on_the_way(listed: Sequence[CheckpointInfo], asked: argparse.Namespace) -> Iterable[CheckpointInfo]:
    if asked.quiet or asked.json or not sys.stderr.isatty():
        return listed
    return track(listed, "Verifying", console=safe_console(), transient=True)


def _comparison(run: RunFolder) -> dict[str, Any]:
    """The metric by which a run says which checkpoint is the best, and its mode; nothing, where it does not say.

    Only that section of its configuration is read: the classes that it names elsewhere need not be there.
    """
    if run.config_file.is_symlink() or not run.config_file.is_file():
        return {}
    try:
        tree = read_tree(run.config_file, (), Problems(), may_include=False)
        section = _told_to_fit(tree) if tree.at("style") is not None else _saver_of(tree)
        if section is None:
            return {}
        saver = config_from({"callbacks": {_SAVER: section}}, TrainerConfig).saver
    except ConfigError:
        return {}
    return {} if saver is None else {"monitor": saver.monitor, "mode": saver.best_mode}


def _saver_of(tree: Node) -> Any:
    callbacks = tree.at("trainer.callbacks")
    section = None if callbacks is None else callbacks.child(_SAVER)
    return None if section is None else section.data()


def _told_to_fit(tree: Node) -> dict[str, Any]:
    metric, mode = tree.at("metric"), tree.at("mode")
    given = {"monitor": metric, "mode": mode}
    return {name: node.data() for name, node in given.items() if node is not None}
