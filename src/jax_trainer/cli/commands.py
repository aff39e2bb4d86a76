"""The commands that train nothing, and what all commands share. Each gives an outcome, for scripts and for people."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import numpy as np

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.cli import tables
from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.cli.runs import RunSelector, select_run, without_resume
from jax_trainer.config import (
    Described,
    Loaded,
    import_user_code,
    json_schema,
    keys_of,
    redact,
    registered_classes,
)
from jax_trainer.optimizer import GroupConfig
from jax_trainer.redaction import secret_values
from jax_trainer.settings import SettingsError
from jax_trainer.suggestions import nearest
from jax_trainer.trainer import Experiment, StoredRun, build, load_experiment, stored_run
from jax_trainer.trainer.layout import MeshConfig, ShardingConfig, ShardingRuleConfig


def version() -> str:
    """The version of the package."""
    try:
        return installed_version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0.0.0"


def test(asked: argparse.Namespace) -> Outcome:
    """Judges the weights of a run on its test data."""
    changes, source = changes_of(asked), select_run(asked, "best")
    loaded, folder = stored(source, changes), source.folder
    if not CheckpointStore(folder.checkpoints).infos():
        begin = shlex.join(["jax-trainer", "resume", str(folder.path)])
        raise WrongInput(f"{folder.path} has no checkpoint: it saved nothing. Begin it again by `{begin}`.")
    source.check_saved()
    with told_with_places(asked, loaded):
        trainer = built(loaded, folder)
        if trainer.dataset.test_loader is None:
            raise WrongInput(f"The dataset of {folder.path} has no test data.")
        saved = trainer.load_model(which=source.which)
        metrics = scalars(trainer.test_model(trainer.dataset.test_loader))
    run = redact(str(folder.path), secrets=asked.secrets)
    data = {"status": "completed", "run": run, "which": source.which, "metrics": {"test": metrics}}
    # a `load_model` of the user's own need not say what it loaded
    weights = str(source.which) if saved is None else f"epoch {saved.epoch}, step {saved.step}"
    return Outcome(data, lambda console: tables.metrics(console, {weights: metrics}))


def check(asked: argparse.Namespace) -> Outcome:
    """Reads a configuration, builds everything and traces one step; trains nothing and writes nothing."""
    changes, _ = without_resume(changes_of(asked))  # whatever can be trained can be checked
    loaded = load_experiment(asked.config, changes)
    with told_with_places(asked, loaded):
        loaded.value.trainer.check_limited()  # before the data is loaded
        report = built(loaded).dry_run()
    return Outcome({"status": "completed", **report.data()}, lambda console: tables.dry_run(console, report))


def describe(asked: argparse.Namespace) -> Outcome:
    """Shows a class that a configuration can name, with its keys; without a name, an index of all of them."""
    _import(asked.imports)
    everything = [*_sections(), *registered_classes()]
    chosen = [one for one in everything if asked.name in ("", one.name, one.interface)]
    if not chosen:
        names = {name for one in everything for name in (one.name, one.interface)}
        near = nearest(asked.name, names)
        hint = f"Did you mean `{near}`?" if near else f"There are {', '.join(sorted(names))}."
        raise WrongInput(f"There is no class or interface {shown(asked.name)}. {hint}")
    show = tables.described if asked.name else tables.index
    return Outcome({"classes": [tables.described_data(one) for one in chosen]}, lambda console: show(console, chosen))


def _sections() -> Iterator[Described]:
    """What has keys and is no registered class."""
    for section in (Experiment, MeshConfig, ShardingConfig, ShardingRuleConfig, GroupConfig):
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


def imports_of(asked: argparse.Namespace) -> list[str]:
    """The words of a command that import the same as this one."""
    return [word for name in asked.imports for word in ("--import", name)]


def _import(names: Sequence[str]) -> None:
    for name in names:
        import_user_code(name)


def stored(source: RunSelector, changes: Sequence[str]) -> Loaded[StoredRun]:
    """The configuration of a run that can be used from here. It may come from somebody else."""
    loaded = stored_run(source.folder, changes)
    if loaded.value.dataset is None:
        raise WrongInput(
            f"{source.folder.path} was begun in Python, with data that its configuration does not have. Go on there."
        )
    return loaded


@contextmanager
def told_with_places(asked: argparse.Namespace, loaded: Loaded[Any]) -> Iterator[None]:
    """What a value of the configuration makes impossible is told with its place; its secrets are not told."""
    asked.secrets |= secret_values(loaded.tree.data())
    try:
        yield
    except SettingsError as error:
        raise loaded.error(error) from None


def built(loaded: Loaded[Any], folder: RunFolder | None = None) -> Any:
    """The trainer of a configuration, with its data."""
    try:
        return build(loaded.value, folder=folder)
    except OSError as error:  # a file of the dataset
        raise Failure(str(error)) from None


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Those of `metrics` that are single numbers."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
