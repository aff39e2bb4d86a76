"""The commands `check`, `lr-find`, `describe` and `schema`; which run and checkpoint a command selects."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_trainer.checkpoint.files import shown
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.cli import tables
from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.config import (
    Described,
    Loaded,
    import_installed_projects,
    import_user_code,
    json_schema,
    keys_of,
    registered_classes,
)
from jax_trainer.core.preflight import parse_bytes
from jax_trainer.models.attention import RotaryScalingConfig
from jax_trainer.optimizer import GroupConfig, named  # noqa: F401 - registers classes that `describe` lists
from jax_trainer.optimizer.lr_finder import LEAST_STEPS
from jax_trainer.pretrained import ConfigRowConfig, InputConfig, MappingConfig, NumberingConfig, TensorRowConfig
from jax_trainer.redaction import secret_values
from jax_trainer.registration import missing_projects
from jax_trainer.runs import run_and_step
from jax_trainer.runs.finding import checked_parts
from jax_trainer.settings import SettingsError
from jax_trainer.suggestions import nearest
from jax_trainer.trainer import EvalSetConfig, Experiment, StoredRun, build, load_experiment, stored_run
from jax_trainer.trainer.config import InitFromConfig, RematConfig
from jax_trainer.trainer.experiment import described_mesh
from jax_trainer.trainer.layout import MeshConfig, ShardingConfig, ShardingRuleConfig
from jax_trainer.trainer.lora import LoRAConfig

Which = int | Literal["best", "latest"]


def check(args: argparse.Namespace) -> Outcome:
    """Validate a configuration without training: load the data, build the trainer, and trace one step."""
    memory = _bytes(args.memory)
    changes, _ = without_resume(without_allowed(changes_of(args))[0])  # all words of `train`
    loaded = load_experiment(args.config, changes)
    with located_errors(args, loaded):
        loaded.value.trainer.check_limited()  # before the data is loaded
        trainer = built(loaded, mesh=None if args.devices is None else described_mesh(loaded.value, args.devices))
        report = trainer.dry_run()
        data: dict[str, Any] = {"status": "completed", **report.data()}
        if not (args.compile or args.find_batch or args.suggest):
            return Outcome(data, lambda console: tables.dry_run(console, report))
        options = {"memory": memory, "find_batch": args.find_batch, "suggest": args.suggest or None}
        found = trainer.preflight(**options)

    def show(console: Any) -> None:
        tables.dry_run(console, report)
        tables.preflight(console, found)

    return Outcome({**data, "preflight": found.data()}, show, found.problem)


def lr_find(args: argparse.Namespace) -> Outcome:
    """Sweep the learning rate over a few steps, and suggest one; nothing is written but the figure of --plot."""
    if not 0 < args.min_lr < args.max_lr:
        raise WrongInput(f"--min-lr {args.min_lr:g} must be above 0 and below --max-lr {args.max_lr:g}.")
    if args.steps < LEAST_STEPS:
        raise WrongInput(f"--steps must be at least {LEAST_STEPS}, got {args.steps}.")
    if args.plot is not None and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise WrongInput(f"--plot {shown(args.plot)} must end in .png, .svg or .pdf.")
    changes, _ = without_resume(changes_of(args))
    loaded = load_experiment(args.config, changes)
    with located_errors(args, loaded):
        found = built(loaded).lr_find(min_lr=args.min_lr, max_lr=args.max_lr, num_training=args.steps)
    if args.plot is not None:
        found.plot(args.plot)
    problem = "" if found.suggestion is not None else f"No learning rate can be suggested: {found.reason}."
    return Outcome({"status": "completed", **found.data()}, lambda console: tables.lr_find(console, found), problem)


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise WrongInput(f"argument --memory: {error}") from None


def describe(args: argparse.Namespace) -> Outcome:
    """Show a class that a configuration can name, with its keys; without NAME, an index of all classes."""
    names = [word for word in args.names if not word.endswith(".py")]
    _import([*args.imports, *(word for word in args.names if word.endswith(".py"))])
    if len(names) > 1:
        args.error(f"expected one NAME, got {len(names)}: {', '.join(map(shown, names))}.")
    wanted = names[0] if names else ""
    everything = [*_sections(), *registered_classes()]
    chosen = [one for one in everything if wanted in ("", one.name, one.interface)]
    if not chosen:
        known = {name for one in everything for name in (one.name, one.interface)}
        near = nearest(wanted, known)
        hint = f"Did you mean `{near}`?" if near else f"Available: {', '.join(sorted(known))}."
        raise WrongInput(f"Unknown class or interface {shown(wanted)}. {hint}{missing_projects()}")
    show = tables.described if wanted else tables.index
    return Outcome({"classes": [tables.described_data(one) for one in chosen]}, lambda console: show(console, chosen))


def _sections() -> Iterator[Described]:
    """The configuration sections that are not registered classes."""
    of_mappings = (MappingConfig, TensorRowConfig, ConfigRowConfig, NumberingConfig, InputConfig)
    of_trainers = (Experiment, EvalSetConfig, InitFromConfig, MeshConfig, ShardingConfig, ShardingRuleConfig)
    for section in (*of_trainers, LoRAConfig, RematConfig, GroupConfig, RotaryScalingConfig, *of_mappings):
        yield Described(
            section.__name__.removesuffix("Config"),
            "Section",
            (section.__doc__ or "").partition("\n")[0],
            keys_of(section),
        )


def schema(args: argparse.Namespace) -> Outcome:
    """Print the JSON Schema of configuration files, for validation and completion in editors."""
    _import(args.imports)
    document = json_schema(Experiment)
    return Outcome(document, lambda console: console.print_json(data=document))


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
        match self.which:
            case "latest":
                return self.folder.path
            case "best":
                return self._best(trainer)
            case step:
                return self.folder.checkpoints / name_of(step)

    def _best(self, trainer: Any) -> Path:
        saver, monitors = trainer.config.saver, not trainer.has_custom_comparison
        options = {} if saver is None else saver.store_options(monitors=monitors)
        better = {} if monitors else {"better": trainer.is_new_model_better}
        best = CheckpointStore(self.folder.checkpoints, **{**options, **better}).best()
        if best is None:
            raise WrongInput(f"{self.folder.path} has no best checkpoint. Use `--which latest`.")
        return best.path


def select_run(args: argparse.Namespace, default: Which) -> RunSelector:
    """The run and checkpoint of RUN and `--which`; `default` if neither names a checkpoint."""
    folder, step = _opened(args.folder)
    if step is not None and args.which is not None:
        raise WrongInput(f"{shown(args.folder)} is already the checkpoint of step {step}. Leave out `--which`.")
    return RunSelector(folder, step if step is not None else args.which if args.which is not None else default)


_RESUME, _ALLOW = "resume", "allow_changes"
_RESUME_VALUES = (
    "`resume=auto` (continues the newest run that computes the same, or starts a new one), `resume=never` (starts a "
    "new one), or `resume=` with the folder of a run or checkpoint"
)


def without_resume(changes: Sequence[str]) -> tuple[list[str], RunSelector | Literal["auto"] | None]:
    """The overrides without `resume=…`, and the run that it selects; None: a new run. The last one wins."""
    others, value = _without(changes, _RESUME)
    if value in (None, "never", "auto"):
        return others, "auto" if value == "auto" else None
    try:
        folder, step = _opened(value or "no folder")
    except WrongInput as error:
        raise WrongInput(f"expected {_RESUME_VALUES}, found {shown(value)}. {error}") from None
    return others, RunSelector(folder, "latest" if step is None else step)


def without_allowed(changes: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides without `allow_changes=…`, and the parts that it names, in which the run to resume may differ."""
    others, value = _without(changes, _ALLOW)
    try:
        return others, [*checked_parts(value or ())]
    except ValueError as error:
        raise WrongInput(str(error)) from None


def _without(changes: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The overrides without those of `name`, and the last value of it."""
    found = [change for change in changes if change.partition("=")[0] == name]
    return [change for change in changes if change not in found], found[-1].partition("=")[2] if found else None


def _opened(path: str) -> tuple[RunFolder, int | None]:
    try:
        return run_and_step(Path(path))
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None


def changes_of(args: argparse.Namespace) -> list[str]:
    """The overrides `KEY=VALUE`; imports the `.py` files among the arguments."""
    files = [change for change in args.changes if change.endswith(".py") and "=" not in change]
    args.imports = [*args.imports, *files]
    _import(args.imports)
    return [change for change in args.changes if change not in files]


def imports_of(args: argparse.Namespace) -> list[str]:
    """The `--import` options of this command, to repeat in another one."""
    return [word for name in args.imports for word in ("--import", name)]


def _import(names: Sequence[str]) -> None:
    import_installed_projects()
    for name in names:
        import_user_code(name)


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
def located_errors(args: argparse.Namespace, loaded: Loaded[Any]) -> Iterator[None]:
    """Raises a `SettingsError` as a `ConfigError` with file and line, and hides the secrets of the configuration."""
    args.secrets |= secret_values(loaded.tree.data())
    try:
        yield
    except SettingsError as error:
        raise loaded.error(error) from None


def built(loaded: Loaded[Any], folder: RunFolder | None = None, **options: Any) -> Any:
    """The trainer of a configuration, with its dataset; `options`: see `build`."""
    try:
        return build(loaded.value, folder=folder, **options)
    except OSError as error:  # a file of the dataset
        raise Failure(str(error)) from None


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The scalar entries of `metrics`."""
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
