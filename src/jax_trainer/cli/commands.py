"""What each command does. Each gives an outcome: data for scripts, and a way to show it to a person."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.cli import tables
from jax_trainer.config import Loaded, import_user_code, json_schema, registered_classes
from jax_trainer.config.problems import nearest
from jax_trainer.settings import SettingsError
from jax_trainer.trainer import Experiment, StoredRun, TrainerModule, build, load_experiment, stored_run


class WrongInput(Exception):
    """The command asks for something that is not there."""


class Failure(Exception):
    """Something outside of the program is missing or broken, and the message says what."""


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
    loaded = load_experiment(asked.config, _changes(asked))
    trainer = _built(loaded)
    return _trained(trainer, loaded, asked, resume=False)


def resume(asked: argparse.Namespace) -> Outcome:
    """Goes on with a run from its latest checkpoint, to the end that its configuration says."""
    changes = _changes(asked)
    folder = _opened(asked.folder)
    loaded = stored_run(folder, changes)
    return _trained(_built(loaded, folder), loaded, asked, resume=True)


def test(asked: argparse.Namespace) -> Outcome:
    """Judges the weights of a run on its test data."""
    changes = _changes(asked)
    folder = _opened(asked.folder)
    trainer = _built(stored_run(folder, changes), folder)
    trainer.load_model(int(asked.which) if asked.which.isdigit() else asked.which)
    if trainer.dataset is None or trainer.dataset.test_loader is None:
        raise WrongInput(f"The dataset of {folder.path} has no test data.")
    metrics = _scalars(trainer.test_model(trainer.dataset.test_loader))
    data = {"status": "completed", "run": str(folder.path), "which": asked.which, "metrics": {"test": metrics}}
    return Outcome(data, lambda console: tables.metrics(console, {"test": metrics}))


def check(asked: argparse.Namespace) -> Outcome:
    """Reads a configuration, builds everything and traces one step; trains nothing and writes nothing."""
    loaded = load_experiment(asked.config, _changes(asked))
    trainer = _built(loaded)
    report = trainer.dry_run()
    return Outcome({"status": "completed", **report.data()}, lambda console: tables.dry_run(console, report))


def describe(asked: argparse.Namespace) -> Outcome:
    """Shows every class that a configuration can name, with its keys, their types, defaults and purpose."""
    _import(asked.imports)
    everything = list(registered_classes())
    chosen = [one for one in everything if asked.name in ("", one.name, one.interface)]
    if not chosen:
        names = {name for one in everything for name in (one.name, one.interface)}
        near = nearest(asked.name, names)
        hint = f"Did you mean `{near}`?" if near else f"There are {', '.join(sorted(names))}."
        raise WrongInput(f"There is no class or interface {asked.name!r}. {hint}")
    return Outcome({"classes": [tables.described_data(one) for one in chosen]}, lambda c: tables.described(c, chosen))


def schema(asked: argparse.Namespace) -> Outcome:
    """Prints a JSON schema of configurations, by which editors check and complete them."""
    _import(asked.imports)
    whole = json_schema(Experiment)
    return Outcome(whole, lambda console: console.print_json(data=whole))


def _changes(asked: argparse.Namespace) -> list[str]:
    files = [change for change in asked.changes if change.endswith(".py") and "=" not in change]
    _import([*asked.imports, *files])
    return [change for change in asked.changes if change not in files]


def _import(names: Sequence[str]) -> None:
    for name in names:
        import_user_code(name)


def _opened(folder: str) -> RunFolder:
    try:
        return RunFolder.open(Path(folder))
    except FileNotFoundError as error:
        raise WrongInput(str(error)) from None


def _built(loaded: Loaded[Any], folder: RunFolder | None = None) -> TrainerModule:
    """The trainer with its data; what a value of the configuration makes impossible is told with its place."""
    try:
        trainer = build(loaded.value, folder=folder)
        if trainer.dataset is not None:
            trainer.prepare(trainer.dataset.train_loader)
        return trainer
    except SettingsError as error:
        raise loaded.error(error) from None
    except OSError as error:  # a file of the dataset
        raise Failure(str(error)) from None


def _trained(
    trainer: TrainerModule, loaded: Loaded[StoredRun] | Loaded[Experiment], asked: argparse.Namespace, *, resume: bool
) -> Outcome:
    dataset = trainer.dataset
    if dataset is None:
        raise WrongInput("This run was begun in Python, with data that is not part of its configuration. Resume it there.")
    results = trainer.train_model(
        dataset.train_loader,
        dataset.val_loader,
        dataset.test_loader,
        resume=resume,
        quiet=asked.quiet or asked.json,
    )
    assert trainer.folder is not None
    metrics = {str(place): _scalars(values) for place, values in results.items()}
    data = {"status": "completed", "run": str(trainer.folder.path), "metrics": metrics}
    return Outcome(data, lambda console: tables.trained(console, metrics, trainer.folder.path))


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
