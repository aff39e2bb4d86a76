"""`jax-trainer ckpt`: lists, verifies and uploads the checkpoints of a run without building its model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.ranking import best_first, describe_mode, newest_first
from jax_trainer.diagnostics.files import read_bounded, shown
from jax_trainer.diagnostics.output import safe_console, tame
from jax_trainer.tools.cli.command import Command, flag, positional
from jax_trainer.tools.cli.outcomes import Outcome, WrongInput, line, reporting, table
from jax_trainer.tools.reports.listing import find_runs
from jax_trainer.tools.reports.sections import bytes_of

_MAX_METRICS = 3  # per row, if none is monitored
_MAX_NAMED = 10  # damaged ones, and files that a mirror lacks
_MAX_ADDRESS = 4096  # bytes


class Ckpt(Command):
    """List the checkpoints of a run: metrics, size on disk, and whether they are complete.

    Without --verify only names and sizes are checked; with it, every byte is compared with its digest.

    Args:
        folder: run folder, or a checkpoint folder inside it
        verify: read every byte and compare it with its digest
        upload: upload what the mirror of the run (`logger.mirror`) lacks

    Examples:
        jax-trainer ckpt runs/CNN/20261115-142311
        jax-trainer ckpt runs/CNN/20261115-142311 --verify
    """

    summary = "list and verify the checkpoints of a run"

    folder: str = positional("RUN")
    verify: bool = flag()
    upload: bool = flag()

    def run(self) -> Outcome:
        from jax_trainer.checkpoint.record import name_of
        from jax_trainer.checkpoint.store import CheckpointStore

        path = Path(self.folder).absolute()
        inside, only = _target(path)
        store, folder = CheckpointStore(inside), RunFolder(inside.parent)
        everything = store.infos()
        listed = [one for one in everything if only in (None, one.path)]
        if only is not None and not listed:
            names = ", ".join(one.path.name for one in everything)
            hint = f"Available: {names}." if names else f"The folder has no checkpoints (named like {name_of(120)})."
            raise WrongInput(f"{only} is not a checkpoint. {hint}")
        problems = {one.path: one.problem for one in listed}
        if self.verify:
            is_shown = not (self.quiet or self.json) and sys.stderr.isatty()
            followed = track(listed, "Verifying", console=safe_console(), transient=True) if is_shown else listed
            problems = {one.path: one.problem or store.verify(one.path) for one in followed}
        run = next(iter(find_runs(folder.path)), None)  # its classes need not be imported
        monitor, mode = (run and run.monitor) or (None, "min")
        monitor, mode = (monitor, mode) if mode else (None, "min")
        intact = [one for one in listed if not problems[one.path]]
        latest = next(iter(newest_first(intact, ("opt_state",))), None)
        best = None if monitor is None else next(iter(best_first(intact, monitor, mode)), None)
        checkpoints = [
            {
                **vars(one),
                "epoch": None if one.problem else one.epoch,  # unknown for an unreadable checkpoint
                "path": str(one.path),
                "kept_as": [name for name, other in (("latest", latest), ("best", best)) if one is other],
                "problem": problems[one.path],
            }
            for one in listed
        ]
        notes = [] if listed else ["Nothing was saved."]
        if monitor is not None and best is not None:
            notes.append(f"best: epoch {best.epoch}, step {best.step}, by {shown(monitor)} ({describe_mode(mode)})")
        if any(one.without for one in listed):
            notes.append("weights only (see `lacks`): can be loaded and tested, but not resumed")
        damaged = [one for one in checkpoints if one["problem"]] if self.verify else []
        data: dict[str, Any] = {"status": "failed" if damaged else "completed", "run": self.redacted(str(path))}
        data |= {"checkpoints": checkpoints, "verified": self.verify}
        data |= {"monitor": monitor, "mode": mode if monitor else None}
        if self.upload:
            data["mirror"] = _uploaded(folder)
            notes.append(f"complete copy: {shown(data['mirror'])}")
        problem = ""
        if damaged:
            count = f"{len(damaged)} of {len(listed)} checkpoints" if len(listed) > 1 else "The checkpoint"
            reasons = " ".join(f"{Path(one['path']).name}: {_why(one)}" for one in damaged[:_MAX_NAMED])
            problem = f"{data['run']}: {count} cannot be used. {reasons}"
        return Outcome(data, lambda console: _show(console, data, notes), problem)


def _show(console: Console, data: Mapping[str, Any], notes: list[str]) -> None:
    """One row per checkpoint, and the notes below."""
    checkpoints, monitor = data["checkpoints"], data["monitor"]
    is_monitored = any(monitor in one["metrics"] for one in checkpoints)
    rows = []
    for one in checkpoints:
        why, values = _why(one), one["metrics"]
        names = [monitor] if is_monitored else sorted(values)[:_MAX_METRICS]
        metrics = ", ".join(f"{name[:60]} {values[name]:.6g}" for name in names if name in values)
        state = f"damaged: {why}" if why else "verified" if data["verified"] else "ok"
        cells = str(one["step"]), "" if one["epoch"] is None else str(one["epoch"]), metrics, bytes_of(one["bytes"])
        rows.append(map(tame, (*cells, ", ".join(one["without"]), ", ".join(one["kept_as"]), state)))
    if rows:
        console.print(table("step", "epoch", "metric", "size", "lacks", "kept as", "state", rows=rows))
    for note in notes:
        line(console, tame(note))


def _why(one: Mapping[str, Any]) -> str:
    return one["problem"].removeprefix(f"{one['path']} is damaged: ").removeprefix(f"{one['path']}: ")


def _uploaded(run: RunFolder) -> str:
    """The address of the copy of a run in its store, which has all of its files now."""
    from jax_trainer.checkpoint.mirror import ADDRESS, Mirror
    from jax_trainer.datasets.storage import StoreError, url_problem

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
        raise WrongInput(f"{url} lacks {', '.join(missing[:_MAX_NAMED])}, which cannot be uploaded. See `--verify`.")
    return url


def _target(path: Path) -> tuple[Path, Path | None]:
    """The folder of checkpoints that a path of the command line means, and the one checkpoint if the path is one."""
    inside = RunFolder(path).checkpoints
    if inside.is_symlink():
        raise WrongInput(f"{inside} is a symbolic link. A run folder may contain only regular files and folders.")
    if not inside.is_dir():
        if path.is_dir() and path.name == inside.name:
            return path, None
        if path.parent.name == inside.name and path.parent.is_dir():
            return path.parent, path
        with reporting(wrong=(OSError, ValueError)):
            RunFolder.open(path)  # nothing was saved
    return inside, None
