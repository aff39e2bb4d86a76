"""What each command does. Each gives an outcome: data for scripts, and a way to show it to a person."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.cli import tables
from jax_trainer.config import (
    Described,
    Loaded,
    import_user_code,
    json_schema,
    keys_of,
    redact,
    registered_classes,
)
from jax_trainer.config.problems import nearest
from jax_trainer.config.secrets import secret_values
from jax_trainer.optimizer import GroupConfig
from jax_trainer.settings import SettingsError
from jax_trainer.trainer import Experiment, StoredRun, build, load_experiment, stored_run

CTRL_C, TERMINATED = 130, 143


class WrongInput(Exception):
    """The command asks for something that is not there."""


class Failure(Exception):
    """Something outside of the program is missing or broken, and the message says what."""


class Interrupted(Exception):
    """A person or the system ended the run; the message says how to go on."""

    def __init__(self, code: int, text: str, run: str) -> None:
        super().__init__(text)
        self.code, self.run = code, run


@dataclass(frozen=True)
class Outcome:
    """What came out: for scripts, and for people."""

    data: dict[str, Any]
    show: Callable[[Console], None]


def version() -> str:
    """The version of the package."""
    try:
        return installed_version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0.0.0"


def train(asked: argparse.Namespace) -> Outcome:
    """Trains what a file describes, then tests the weights that were best in validation."""
    return _trained(asked, load_experiment(asked.config, changes_of(asked)))


def resume(asked: argparse.Namespace) -> Outcome:
    """Goes on with a run from its latest checkpoint, to the end that its configuration says."""
    folder, loaded = _opened(asked)
    return _trained(asked, loaded, folder)  # with other values, if there are any, from now on


def test(asked: argparse.Namespace) -> Outcome:
    """Judges the weights of a run on its test data."""
    folder, loaded = _opened(asked)
    with _told_with_places(asked, loaded):
        trainer = _built(loaded, folder)
        if trainer.dataset.test_loader is None:
            raise WrongInput(f"The dataset of {folder.path} has no test data.")
        trainer.load_model(which=asked.which)
        metrics = _scalars(trainer.test_model(trainer.dataset.test_loader))
    run = redact(str(folder.path), secrets=asked.secrets)
    data = {"status": "completed", "run": run, "which": asked.which, "metrics": {"test": metrics}}
    return Outcome(data, lambda console: tables.metrics(console, {"test": metrics}))


def check(asked: argparse.Namespace) -> Outcome:
    """Reads a configuration, builds everything and traces one step; trains nothing and writes nothing."""
    loaded = load_experiment(asked.config, changes_of(asked))
    with _told_with_places(asked, loaded):
        report = _built(loaded).dry_run()
    return Outcome({"status": "completed", **report.data()}, lambda console: tables.dry_run(console, report))


def describe(asked: argparse.Namespace) -> Outcome:
    """Shows every class that a configuration can name, with its keys, their types, defaults and purpose."""
    _import(asked.imports)
    everything = [*_sections(), *registered_classes()]
    chosen = [one for one in everything if asked.name in ("", one.name, one.interface)]
    if not chosen:
        names = {name for one in everything for name in (one.name, one.interface)}
        near = nearest(asked.name, names)
        hint = f"Did you mean `{near}`?" if near else f"There are {', '.join(sorted(names))}."
        raise WrongInput(f"There is no class or interface {shown(asked.name)}. {hint}")
    return Outcome({"classes": [tables.described_data(one) for one in chosen]}, lambda c: tables.described(c, chosen))


def _sections() -> Iterator[Described]:
    """What has keys and is no registered class."""
    for section in (Experiment, GroupConfig):
        yield Described(
            section.__name__.removesuffix("Config"),
            "Section",
            (section.__doc__ or "").partition("\n")[0],
            keys_of(section),
        )


def schema(asked: argparse.Namespace) -> Outcome:
    """Prints a JSON schema of configurations, by which editors check and complete them."""
    _import(asked.imports)
    whole = json_schema(Experiment)
    return Outcome(whole, lambda console: console.print_json(data=whole))


def changes_of(asked: argparse.Namespace) -> list[str]:
    """The overrides; what else is given are files to import."""
    files = [change for change in asked.changes if change.endswith(".py") and "=" not in change]
    asked.imports = [*asked.imports, *files]
    _import(asked.imports)
    return [change for change in asked.changes if change not in files]


def _import(names: Sequence[str]) -> None:
    for name in names:
        import_user_code(name)


def _opened(asked: argparse.Namespace) -> tuple[RunFolder, Loaded[StoredRun]]:
    """The folder of a run that can be gone on with, and its configuration. Both may come from somebody else."""
    changes = changes_of(asked)
    try:
        folder = RunFolder.open(Path(asked.folder))
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None
    loaded = stored_run(folder, changes)
    if loaded.value.dataset is None:
        raise WrongInput(
            f"{folder.path} was begun in Python, with data that its configuration does not have. Go on there."
        )
    _check_saved(folder, getattr(asked, "which", "latest"))
    return folder, loaded


def _check_saved(folder: RunFolder, which: str | int) -> None:
    steps = _steps(folder)
    if not steps:
        again = shlex.join(["jax-trainer", "train", str(folder.config_file)])
        raise WrongInput(f"{folder.path} has no checkpoint. Begin again by `{again}`.")
    if isinstance(which, int) and which not in steps:
        raise WrongInput(f"{folder.path} has no checkpoint of step {which}. There are {', '.join(map(str, steps))}.")


def _steps(folder: RunFolder) -> list[int]:
    return CheckpointStore(folder.checkpoints).steps()


@contextmanager
def _told_with_places(asked: argparse.Namespace, loaded: Loaded[Any]) -> Iterator[None]:
    """What a value of the configuration makes impossible is told with its place; its secrets are not told."""
    asked.secrets |= secret_values(loaded.tree.data())
    try:
        yield
    except SettingsError as error:
        raise loaded.error(error) from None


def _built(loaded: Loaded[Any], folder: RunFolder | None = None) -> Any:
    try:
        return build(loaded.value, folder=folder)
    except OSError as error:  # a file of the dataset
        raise Failure(str(error)) from None


def _trained(asked: argparse.Namespace, loaded: Loaded[Any], folder: RunFolder | None = None) -> Outcome:
    with _told_with_places(asked, loaded):
        trainer = _built(loaded, folder)
        data, quiet = trainer.dataset, asked.quiet or asked.json
        with _told_with_a_way_on(asked, trainer):
            results = trainer.train_model(
                data.train_loader, data.val_loader, data.test_loader, resume=folder is not None, quiet=quiet
            )
    metrics = {str(place): _scalars(values) for place, values in results.items()}
    run = redact(str(trainer.folder.path), secrets=asked.secrets)
    following = _command(asked, "test", trainer.folder) if any(trainer.folder.checkpoints.iterdir()) else ""
    outcome = {"status": "completed", "run": run, "metrics": metrics}
    return Outcome(outcome, lambda console: tables.trained(console, metrics, run, following))


@contextmanager
def _told_with_a_way_on(asked: argparse.Namespace, trainer: Any) -> Iterator[None]:
    """Whatever ends a run, a person learns how to go on with it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = CTRL_C if isinstance(end, KeyboardInterrupt) else end.code
        if code not in (CTRL_C, TERMINATED):
            raise  # something of the user's has asked for another end
        run = "" if trainer.folder is None else redact(str(trainer.folder.path), secrets=asked.secrets)
        raise Interrupted(code, f"Interrupted. {_way_on(asked, trainer.folder)}", run) from None
    except Exception as error:
        if trainer.folder is not None:
            error.add_note(f"The run's folder is {trainer.folder.path}. {_way_on(asked, trainer.folder)}")
        elif isinstance(error, OSError):
            reason = f"{error.strerror}: {str(error.filename)[:200]}." if error.strerror else str(error)
            raise WrongInput(f"The run's folder cannot be made. {reason}") from None
        raise


def _way_on(asked: argparse.Namespace, folder: RunFolder | None) -> str:
    steps = [] if folder is None else _steps(folder)
    if folder is None or not steps:
        return "Nothing was saved."
    return f"Go on from step {steps[-1]} by `{_command(asked, 'resume', folder)}`."


def _command(asked: argparse.Namespace, name: str, folder: RunFolder) -> str:
    imports = [word for module in asked.imports for word in ("--import", module)]
    path = redact(str(folder.path), secrets=asked.secrets)
    return shlex.join(["jax-trainer", name, path, *imports])


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
