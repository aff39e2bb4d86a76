"""Which run, checkpoint and configuration a command names, and the trainer of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.record import name_of
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config import Loaded, import_installed_projects, import_user_code
from jax_trainer.config.redaction import secret_values
from jax_trainer.config.settings import SettingsError
from jax_trainer.diagnostics.files import shown
from jax_trainer.optimizer import named  # noqa: F401 - registers classes that files can name
from jax_trainer.runs import run_and_step
from jax_trainer.runs.finding import checked_parts
from jax_trainer.runs.spec import store_in
from jax_trainer.tools.cli.command import Command
from jax_trainer.tools.cli.outcomes import WrongInput, reporting
from jax_trainer.trainer import StoredRun, build, load_experiment, stored_run

Which = int | Literal["best", "latest"]


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


def without_resume(overrides: Sequence[str]) -> tuple[list[str], RunSelector | Literal["auto"] | None]:
    """The overrides without `resume=…`, and the run that it selects; None: a new run. The last one wins."""
    others, value = _without(overrides, "resume")
    if value in (None, "never", "auto"):
        return others, "auto" if value == "auto" else None
    try:
        folder, step = opened(value or "no folder")
    except WrongInput as error:
        raise WrongInput(
            "expected `resume=auto` (continues the newest run that computes the same, or starts a new one), "
            "`resume=never` (starts a new one), or `resume=` with the folder of a run or checkpoint, "
            f"found {shown(value)}. {error}"
        ) from None
    return others, RunSelector(folder, "latest" if step is None else step)


def without_allowed(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides without `allow_changes=…`, and the parts that it names, in which the run to resume may differ."""
    others, value = _without(overrides, "allow_changes")
    with reporting(wrong=ValueError):
        return others, [*checked_parts(value or ())]


def _without(overrides: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The overrides without those of `name`, and the last value of it."""
    found = [one for one in overrides if one.partition("=")[0] == name]
    return [one for one in overrides if one not in found], found[-1].partition("=")[2] if found else None


def loaded_config(args: Command) -> Loaded[Any]:
    """The experiment of CONFIG with its overrides, for commands that take the words of `train` and train nothing."""
    return load_experiment(args.config, without_resume(without_allowed(overrides_of(args))[0])[0])


def stored(source: RunSelector, changes: Sequence[str], *, needs_data: bool = True) -> Loaded[StoredRun]:
    """The stored configuration of a run, which must include its dataset. The run folder is not trusted."""
    loaded = stored_run(source.folder, changes)
    if loaded.value.dataset is None and needs_data:
        raise WrongInput(
            f"{source.folder.path} has no `dataset` in its configuration: it was started in Python, or imported. "
            "Use it in Python: `load_from_checkpoint` and `export_pretrained` read it."
        )
    return loaded


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
    loaded = stored(source, overrides, needs_data=not parts)
    source.check_saved()
    with located_errors(args, loaded):
        yield built(loaded, source.folder, **parts), source


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The scalar entries of `metrics`."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
