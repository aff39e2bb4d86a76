"""Runs a command that needs JAX: joins other processes and leaves them; which run and configuration it names."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jax_trainer.checkpoint.folder import RunFolder, RunInUseError
from jax_trainer.checkpoint.record import name_of
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from jax_trainer.config import Loaded, import_installed_projects, import_user_code
from jax_trainer.config.redaction import secret_values
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import DataError
from jax_trainer.diagnostics.files import shown
from jax_trainer.diagnostics.optional_import import MissingExtraError
from jax_trainer.diagnostics.output import SafeStream
from jax_trainer.diagnostics.traced import IndexRangeError
from jax_trainer.optimizer import named  # noqa: F401 - registers classes that files can name
from jax_trainer.runs import run_and_step
from jax_trainer.runs.finding import checked_parts
from jax_trainer.runs.spec import store_in
from jax_trainer.sharding import LOST, Job, JoinError, ProcessLostError, detect_launcher, join, leave, process_group
from jax_trainer.tools.cli.command import Command
from jax_trainer.tools.cli.outcomes import Failure, Outcome, WrongInput, reporting, with_notes
from jax_trainer.trainer import StoredRun, build, load_experiment, stored_run

Which = int | Literal["best", "latest"]


def run(args: Command) -> Outcome:
    """Runs the command; an error that explains itself is raised as a `Failure`, which is shown without a traceback."""
    try:
        return args.run()
    except (SaveError, NonFiniteError, DataError, IndexRangeError, ProcessLostError) as error:
        # the notes name the run or the batch
        raise Failure(with_notes(str(error), error), LOST if isinstance(error, ProcessLostError) else 1) from error
    except (CheckpointError, MissingExtraError, RunInUseError) as error:
        raise Failure(str(error)) from error


def join_others(args: Command) -> None:
    """Joins the process group if there is one; then only the primary process prints."""
    if not hasattr(args, "distributed"):
        return
    with reporting(wrong=JoinError):
        job = Job(coordinator=args.coordinator, processes=args.processes, process=args.process)
        if args.distributed == "off" and job.is_explicit:
            raise WrongInput(
                "`--distributed off` excludes `--coordinator`, `--processes` and `--process`. Leave them out."
            )
        is_wanted = args.distributed == "on" or (args.distributed == "auto" and bool(detect_launcher()))
        if not (job.is_explicit or is_wanted):
            return
        join(job, heartbeat=args.heartbeat)
    with suppress(io.UnsupportedOperation):  # captured output has no file descriptor to redirect
        # what native libraries print on standard output goes to standard error: with `--json`, ours must be JSON
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        opened = os.fdopen(own, "w", buffering=1)
        sys.stdout = SafeStream(lambda: opened)  # type: ignore[assignment]
    if process_group().is_multi_process and not process_group().is_primary:
        args.quiet, args.json = True, False


def leave_others(timeout: float) -> bool:
    """Leaves the process group, waiting for the others up to `timeout` seconds; False if there is none."""
    has_others = jax.distributed.is_initialized() and process_group().is_multi_process
    if has_others:
        leave(timeout)
    return has_others


# the run and the configuration


@dataclass(frozen=True)
class RunSelector:
    """An existing run and one of its checkpoints."""

    folder: RunFolder
    which: Which

    def check_saved(self) -> None:
        """Raises if no checkpoint of this step exists; a damaged one is reported when it is restored."""
        if not isinstance(self.which, int) or (self.folder.checkpoints / name_of(self.which)).is_dir():
            return
        steps = CheckpointStore(self.folder.checkpoints).steps()
        available = f"Saved steps: {', '.join(map(str, steps))}." if steps else "It has no checkpoint at all."
        raise WrongInput(f"{self.folder.path} has no checkpoint of step {self.which}. {available}")

    def path(self, trainer: Any) -> Path:
        """The path that `train_model` resumes from; `trainer` decides which checkpoint is the best."""
        if self.which != "best":
            return self.folder.path if self.which == "latest" else self.folder.checkpoints / name_of(self.which)
        better = trainer.is_new_model_better if trainer.has_custom_comparison else None
        best = store_in(self.folder, trainer.config.saver, better, is_ranked=True).best()
        if best is None:
            raise WrongInput(f"{self.folder.path} has no best checkpoint. Use `--which latest`.")
        return best.path


def select_run(args: Command, default: Which) -> RunSelector:
    """The run and checkpoint of RUN and `--which`; `default` if neither names a checkpoint."""
    (folder, step), which = opened(args.folder), getattr(args, "which", None)
    if step is not None and which is not None:
        raise WrongInput(f"{shown(args.folder)} is already the checkpoint of step {step}. Leave out `--which`.")
    return RunSelector(folder, next(one for one in (step, which, default) if one is not None))


def opened(path: str) -> tuple[RunFolder, int | None]:
    """The run of `path`, and its step if it is a checkpoint."""
    with reporting(wrong=(OSError, ValueError)):
        return run_and_step(Path(path))


def overrides_of(args: Command) -> list[str]:
    """The overrides `KEY=VALUE`; the `.py` files among them are imported, and become options `--import`."""
    files = [change for change in args.changes if change.endswith(".py") and "=" not in change]
    args.imports = [*args.imports, *files]
    args.changes = [change for change in args.changes if change not in files]
    import_all(args.imports)
    return args.changes


def import_all(names: Sequence[str]) -> None:
    """Imports the installed projects, and the modules and files of `--import`."""
    import_installed_projects()
    for name in names:
        import_user_code(name)


def without_options(overrides: Sequence[str]) -> tuple[list[str], RunSelector | Literal["auto"] | None, list[str]]:
    """The overrides, without two that are no keys, of which the last one wins; and what these say.

    They are the run that `resume=…` selects (None: a new run), and the parts of `allow_changes=…`, in which the run to
    resume may differ.
    """
    words = {one.partition("=")[0]: one.partition("=")[2] for one in overrides}
    others = [one for one in overrides if one.partition("=")[0] not in ("resume", "allow_changes")]
    with reporting(wrong=ValueError):
        allowed = [*checked_parts(words.get("allow_changes", ()))]
    value = words.get("resume", "never")
    if value in ("never", "auto"):
        return others, "auto" if value == "auto" else None, allowed
    try:
        folder, step = opened(value or "no folder")
    except WrongInput as error:
        raise WrongInput(
            "expected `resume=auto` (continues the newest run that computes the same, or starts a new one), "
            "`resume=never` (starts a new one), or `resume=` with the folder of a run or checkpoint, "
            f"found {shown(value)}. {error}"
        ) from None
    return others, RunSelector(folder, "latest" if step is None else step), allowed


def loaded_config(args: Command) -> Loaded[Any]:
    """The experiment of CONFIG with its overrides, for commands that take the words of `train` and train nothing."""
    return load_experiment(args.config, without_options(overrides_of(args))[0])


def check_data(source: RunSelector, loaded: Loaded[StoredRun]) -> None:
    """Raises unless the stored configuration of a run includes its dataset."""
    if loaded.value.dataset is None:
        raise WrongInput(
            f"{source.folder.path} has no `dataset` in its configuration: it was started in Python, or imported. "
            "Use it in Python: `load_from_checkpoint` and `export_pretrained` read it."
        )


@contextmanager
def located_errors(args: Command, loaded: Loaded[Any]) -> Iterator[None]:
    """Raises a `SettingsError` as a `ConfigError` with file and line, and hides the secrets of the configuration."""
    args.secrets |= secret_values(loaded.tree.data())
    try:
        yield
    except SettingsError as error:
        raise loaded.error(error) from None


def built(loaded: Loaded[Any], folder: RunFolder | None = None, **options: Any) -> Any:
    """The trainer of a configuration, with its dataset; `options`: see `build`."""
    with reporting(failed=OSError):  # a file of the dataset
        return build(loaded.value, folder=folder, **options)


@contextmanager
def stored_trainer(
    args: Command, default: Which, parts_for: Callable[[Path], dict[str, Any]] = lambda folder: {}
) -> Iterator[tuple[Any, RunSelector]]:
    """The trainer of RUN, with the overrides, and the checkpoint that was selected.

    Args:
        args: the command.
        default: the checkpoint without `--which`.
        parts_for: returns what a run without data needs instead, see `build`; nothing: it needs its dataset.
    """
    overrides, source = overrides_of(args), select_run(args, default)
    parts = parts_for(source.folder.path)
    loaded = stored_run(source.folder, overrides)
    if not parts:
        check_data(source, loaded)
    source.check_saved()
    with located_errors(args, loaded):
        yield built(loaded, source.folder, **parts), source


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The scalar entries of `metrics`."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
