"""The command `ckpt`: lists, verifies and uploads the checkpoints of a run without building its model."""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.progress import track

from jax_trainer.checkpoint.files import read_bounded, shown
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.ranking import Direction, best_first, describe_mode, newest_first
from jax_trainer.checkpoint.store import CheckpointInfo, CheckpointStore
from jax_trainer.cli import tables
from jax_trainer.cli.outcomes import Outcome, WrongInput
from jax_trainer.config import ConfigError, config_from, redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import Problems
from jax_trainer.mirror import ADDRESS, Mirror
from jax_trainer.output import safe_console
from jax_trainer.storage import StoreError, url_problem
from jax_trainer.trainer import TrainerConfig

_SAVER = "ModelCheckpoint"
_MAX_METRICS = 3  # per row, if none is monitored
_MAX_STRAYS = 10
_MAX_ADDRESS = 4096  # bytes


def ckpt(args: argparse.Namespace) -> Outcome:
    """List the checkpoints of a run: metrics, size on disk, and whether they are complete."""
    target = _target(Path(args.folder).absolute())
    store = CheckpointStore(target.checkpoints)
    everything = store.infos()
    listed = [one for one in everything if target.only in (None, one.path)]
    if target.only is not None and not listed:
        raise WrongInput(f"{target.only} is not a checkpoint. {_available(everything)}")
    problems = {one.path: one.problem for one in listed}
    if args.verify:
        problems = {one.path: one.problem or store.verify(one.path) for one in _with_progress(listed, args)}
    compared = _comparison(RunFolder(target.checkpoints.parent))
    report = CheckpointReport(listed, problems, _strays(target, everything), verified=args.verify, **compared)
    run = redact(str(target.path), secrets=args.secrets)
    url = _uploaded(RunFolder(target.checkpoints.parent)) if args.upload else None
    notes = [*report.notes(), *([] if url is None else [f"complete copy: {shown(url)}"])]
    status = "failed" if args.verify and report.damaged else "completed"
    return Outcome(
        {"status": status, "run": run, **report.data(), **({} if url is None else {"mirror": url})},
        lambda console: tables.checkpoints(console, report.rows(), notes),
        problem=f"{run}: {report.damage_summary()}" if args.verify and report.damaged else "",
    )


def _uploaded(run: RunFolder) -> str:
    """The address of the copy of a run in its store, which has all of its files now."""
    try:
        url = read_bounded(run.path / ADDRESS, _MAX_ADDRESS).strip()
    except ValueError:
        raise WrongInput(f"{run.path} has no {ADDRESS}: it was not trained with `logger.mirror`.") from None
    if problem := url_problem(url):
        raise WrongInput(f"{run.path / ADDRESS}: {problem}")
    with run.locked():  # a run that trains uploads itself
        try:
            missing = Mirror(run, url).sync()
        except StoreError as error:
            raise WrongInput(f"Nothing, or only a part, was uploaded. {error}. Try again.") from None
    if missing:  # damaged here
        raise WrongInput(f"{url} lacks {', '.join(missing[:_MAX_STRAYS])}, which cannot be uploaded. See `--verify`.")
    return url


@dataclass(frozen=True)
class _Target:
    """The path from the command line, its folder of checkpoints, and the one checkpoint if the path is one."""

    path: Path
    checkpoints: Path
    only: Path | None = None


def _target(path: Path) -> _Target:
    inside = RunFolder(path).checkpoints
    if inside.is_symlink():
        raise WrongInput(f"{inside} is a symbolic link. A run folder may contain only regular files and folders.")
    if inside.is_dir():
        return _Target(path, inside)
    if path.is_dir() and path.name == inside.name:
        return _Target(path, path)
    if path.parent.name == inside.name and path.parent.is_dir():
        return _Target(path, path.parent, path)
    try:
        return _Target(path, RunFolder.open(path).checkpoints)  # nothing was saved
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None


def _available(listed: Sequence[CheckpointInfo]) -> str:
    names = ", ".join(one.path.name for one in listed)
    return f"Available: {names}." if names else f"The folder has no checkpoints (named like {name_of(120)})."


def _strays(target: _Target, listed: Sequence[CheckpointInfo]) -> list[str]:
    """Entries that are not checkpoints. Hidden ones are checkpoints that are being written or deleted."""
    if target.only is not None or not target.checkpoints.is_dir():
        return []
    known = {one.path.name for one in listed}
    return sorted(name for name in os.listdir(target.checkpoints) if name not in known and not name.startswith("."))


def _with_progress(listed: Sequence[CheckpointInfo], args: argparse.Namespace) -> Iterable[CheckpointInfo]:
    if args.quiet or args.json or not sys.stderr.isatty():
        return listed
    return track(listed, "Verifying", console=safe_console(), transient=True)


def _comparison(run: RunFolder) -> dict[str, Any]:
    """The metric by which the run chooses its best checkpoint, and its mode; empty if it monitors none.

    Only that section of the configuration is read, so classes named elsewhere need not be imported.
    """
    if run.config_file.is_symlink() or not run.config_file.is_file():
        return {}
    try:
        tree = read_tree(run.config_file, (), Problems(), may_include=False)
        section = _fit_monitor(tree) if tree.at("style") is not None else _saver_of(tree)
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


def _fit_monitor(tree: Node) -> dict[str, Any]:
    """The same of a run of `fit`, which stores its arguments."""
    nodes = {"monitor": tree.at("metric"), "mode": tree.at("mode")}
    return {name: node.data() for name, node in nodes.items() if node is not None}


@dataclass(frozen=True)
class CheckpointReport:
    """The checkpoints of a run with their metrics, sizes and problems.

    Args:
        listed: the checkpoints by ascending step.
        problems: by path, why a checkpoint cannot be used; "" if it can.
        strays: names of other entries in the folder.
        verified: whether all bytes were read and compared with their digests.
        monitor: the metric by which the run compares checkpoints.
        mode: whether a lower (min) or a higher (max) value of it is better.
    """

    listed: Sequence[CheckpointInfo]
    problems: Mapping[Path, str]
    strays: Sequence[str]
    verified: bool
    monitor: str | None = None
    mode: Direction = "min"

    @property
    def damaged(self) -> list[CheckpointInfo]:
        """The checkpoints that cannot be used."""
        return [one for one in self.listed if self.problems[one.path]]

    def data(self) -> dict[str, Any]:
        """The report as JSON-serializable data."""
        checkpoints = [
            {
                "step": one.step,
                "epoch": None if one.problem else one.epoch,
                "path": str(one.path),
                "metrics": dict(one.metrics),
                "bytes": one.bytes,
                "without": list(one.without),
                "kept_as": self._kept_as(one),
                "problem": self.problems[one.path],
            }
            for one in self.listed
        ]
        compared = {"monitor": self.monitor, "mode": self.mode if self.monitor else None}
        return {"checkpoints": checkpoints, "strays": list(self.strays), "verified": self.verified, **compared}

    def rows(self) -> list[list[str]]:
        """One row per checkpoint: step, epoch, metrics, bytes, missing parts, kept as, state."""
        return [self._row(one) for one in self.listed]

    def notes(self) -> list[str]:
        """Lines below the table."""
        notes = [] if self.listed else ["Nothing was saved."]
        if self.monitor is not None and self._best is not None:
            position = f"epoch {self._best.epoch}, step {self._best.step}"
            notes.append(f"best: {position}, by {shown(self.monitor)} ({describe_mode(self.mode)})")
        if any(one.without for one in self.listed):
            notes.append("weights only (see `lacks`): can be loaded and tested, but not resumed")
        if self.strays:
            more = f" and {len(self.strays) - _MAX_STRAYS} more" if len(self.strays) > _MAX_STRAYS else ""
            named = ", ".join(map(shown, self.strays[:_MAX_STRAYS]))
            notes.append(f"ignored, not a checkpoint: {named}{more}")
        return notes

    def damage_summary(self) -> str:
        """How many checkpoints cannot be used, and why."""
        reasons = " ".join(f"{one.path.name}: {self._why(one)}" for one in self.damaged[:_MAX_STRAYS])
        count = f"{len(self.damaged)} of {len(self.listed)}" if len(self.listed) > 1 else "The"
        return f"{count} checkpoint{'s' if len(self.listed) > 1 else ''} cannot be used. {reasons}"

    def _row(self, one: CheckpointInfo) -> list[str]:
        why, kept = self._why(one), ", ".join(self._kept_as(one))
        state = f"damaged: {why}" if why else "verified" if self.verified else "ok"
        epoch = "" if one.problem else str(one.epoch)  # unknown for an unreadable checkpoint
        return [str(one.step), epoch, self._metrics(one), str(one.bytes), ", ".join(one.without), kept, state]

    def _why(self, one: CheckpointInfo) -> str:
        return self.problems[one.path].removeprefix(f"{one.path} is damaged: ").removeprefix(f"{one.path}: ")

    def _metrics(self, one: CheckpointInfo) -> str:
        names = self._compared or sorted(one.metrics)[:_MAX_METRICS]
        return ", ".join(f"{name[:60]} {one.metrics[name]:.6g}" for name in names if name in one.metrics)

    @cached_property
    def _compared(self) -> list[str]:
        """The monitored metric, if any checkpoint has it."""
        return [self.monitor] if self.monitor and any(self.monitor in one.metrics for one in self.listed) else []

    def _kept_as(self, one: CheckpointInfo) -> list[str]:
        return [name for name, other in (("latest", self._latest), ("best", self._best)) if one is other]

    @cached_property
    def _latest(self) -> CheckpointInfo | None:
        return next(iter(newest_first(self._intact, ("opt_state",))), None)

    @cached_property
    def _best(self) -> CheckpointInfo | None:
        """The best checkpoint by the store's rule: NaN is never best, and ties go to the earlier step."""
        if self.monitor is None:
            return None
        return next(iter(best_first(self._intact, self.monitor, self.mode)), None)

    @property
    def _intact(self) -> list[CheckpointInfo]:
        return [one for one in self.listed if not self.problems[one.path]]
