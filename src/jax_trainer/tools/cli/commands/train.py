"""`jax-trainer train` and `resume`, and how to resume a run that ended early."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from jax_trainer.config import Loaded
from jax_trainer.config.files import FOLDER, ReadyConfig
from jax_trainer.diagnostics.output import short_path
from jax_trainer.tools.cli import command
from jax_trainer.tools.cli.command import Command, flag, option, positional
from jax_trainer.tools.cli.outcomes import Interrupted, Outcome, WrongInput, interrupting_code, line, show_metrics


class Train(command.OfConfig, command.OfProcesses):
    """Train the experiment of a YAML file, then test the checkpoint with the best validation metric.

    Without CONFIG, list the ready configurations of the package, which are trained by name: `jax-trainer train digits`.
    With `resume=auto`, continue the newest run that computes the same, also to another length, or start a new one.

    Args:
        config: YAML file of the experiment, or the name of a ready configuration, such as digits; without it, they are
            listed
        changes: overrides of configuration values, such as trainer.train_epochs=3, and .py files that register your own
            classes; resume=auto: continue the newest run that computes the same, if any

    Examples:
        jax-trainer train digits trainer.train_epochs=3
        jax-trainer train mine.yaml my_models.py resume=auto
    """

    summary = "train the experiment of a YAML file, then test it"
    starts_devices = trains = True

    config: str = positional("CONFIG", nargs="?")

    def run(self) -> Outcome:
        if not self.config:
            return _ready_configs()
        from jax_trainer.diagnostics.ledger import imported
        from jax_trainer.tools.cli.running import overrides_of, without_options
        from jax_trainer.trainer import load_experiment

        imported()
        overrides, source, allowed = without_options(overrides_of(self))
        return _trained(self, load_experiment(self.config, overrides), source, allowed)


def _ready_configs() -> Outcome:
    """The configurations that ship with the package, one line each."""
    found = [ReadyConfig.of(file) for file in sorted(FOLDER.glob("*.yaml"))]
    width = max(len(one.name) for one in found)
    facts = lambda one: f"{one.summary}. Data: {one.data}. Device: {one.device}. Expected: {one.expected}."
    lines = [f"{one.name:{width}}  {facts(one)}" for one in found]
    lines += ["", "Next: `jax-trainer train digits`, or your own: `jax-trainer init my_project --task image`."]
    lines.append(f"Files to copy: {FOLDER}")
    data = {"status": "completed", "configs": [asdict(one) for one in found]}
    return Outcome(data, lambda console: line(console, "\n".join(lines)))


class Resume(command.OfRun, command.OfProcesses):
    """Resume a run from one of its checkpoints, until the limits of its configuration.

    Overrides (KEY=VALUE) apply from there on, such as trainer.train_epochs=30 to train longer. One that changes what is
    computed needs allow_changes=PART: program, optimizer, callbacks, start or data.

    Args:
        changes: overrides of configuration values, such as trainer.train_epochs=3, and .py files that register your own
            classes
        which: checkpoint to load: best, latest, or a step number (default: latest)
        fork: resume into a new run folder; RUN is not modified

    Examples:
        jax-trainer resume runs/CNN/20261115-142311
        jax-trainer resume runs/CNN/20261115-142311 --fork trainer.train_epochs=30
    """

    summary = "resume a run from a checkpoint"
    starts_devices = trains = True

    which: int | str | None = option(type=command.checkpoint)
    fork: bool = flag()

    def run(self) -> Outcome:
        from jax_trainer.diagnostics.ledger import imported
        from jax_trainer.tools.cli.running import check_data, overrides_of, select_run, without_options
        from jax_trainer.trainer import stored_run

        imported()
        overrides, other, allowed = without_options(overrides_of(self))
        if other is not None:
            raise WrongInput("`resume=` is for `jax-trainer train`: this command resumes RUN. Leave it out.")
        source = select_run(self, "latest")
        check_data(source, loaded := stored_run(source.folder, overrides))
        return _trained(self, loaded, source, allowed, fork=self.fork)


def _trained(args: Command, loaded: Loaded[Any], source: Any, allowed: list[str], *, fork: bool = False) -> Outcome:
    """Trains; `source` is the `RunSelector` of the run to resume, "auto", or None."""
    from jax_trainer.checkpoint.record import checkpoint_infos
    from jax_trainer.tools.cli.running import RunSelector, built, located_errors, scalars

    own = None
    if isinstance(source, RunSelector):
        own = None if fork else source.folder
        if own is not None:
            own.check_free()  # before the data is loaded
        source.check_saved()
    with located_errors(args, loaded):
        loaded.value.trainer.check_limited()  # before the data is loaded
        trainer = built(loaded, own)
        data, quiet = trainer.dataset, args.quiet or args.json
        start = source.path(trainer) if isinstance(source, RunSelector) else source or False
        with _resume_hint_at_the_end(args, trainer):
            loaders = data.train_loader, data.val_loader, data.test_loader
            results = trainer.train_model(*loaders, resume=start, allow_changes=allowed, fork=fork, quiet=quiet)
    metrics = {str(name): scalars(values) for name, values in results.items()}
    run, best = args.redacted(str(trainer.folder.path)), results.best
    outcome = {"status": "completed", "reason": results.reason, "run": run, "metrics": metrics}
    outcome |= {"best": None if best is None else best.data(), "tested": results.tested, "time": results.time.data()}
    outcome["validations"] = [{**one._asdict(), "metrics": scalars(one.metrics)} for one in results.validations]
    # without synchronizing with the other processes, which may have exited
    saved = [one.step for one in checkpoint_infos(trainer.folder.checkpoints) if not one.problem]
    lines = _lines(args, results, short_path(run), saved)

    def show(console: Any) -> None:
        show_metrics(console, _by_weights(results, metrics))
        line(console, "\n".join(lines))

    return Outcome(outcome, show)


def _lines(args: Command, results: Any, run: str, saved: list[int]) -> list[str]:
    """Facts about a run that has ended, and the commands that may follow, each with what it does."""
    lines, best = [], results.best
    if best is not None and best.step in saved:
        lines.append(f"Best checkpoint: {best.description}")
    elif best is not None:
        hint = "" if saved else ". The callback `ModelCheckpoint` saves them"
        lines.append(f"Best validation: {best.description}; its weights were not saved{hint}")
    following = {_command(args, "test", run): "test the best weights"} if saved else {}
    following[shlex.join(["jax-trainer", "report", run])] = "curves as an HTML page"
    width = max(map(len, following))
    shown = (f"{command:<{width}}  # {text}" for command, text in following.items())
    return [*lines, f"Time: {results.time.line}", f"Run folder: {run}", "Next: " + "\n      ".join(shown)]


def _by_weights(results: Any, metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The metrics of the last validation and of the test, by the weights that were evaluated."""
    shown: dict[str, dict[str, float]] = {}
    if results.validations:
        last = results.validations[-1]
        shown[f"last: epoch {last.epoch}, step {last.step}"] = metrics[str(last.epoch)]
    if results.tested is not None:
        best = results.best if results.tested == "best" else None
        weights = "last weights" if best is None else f"best: epoch {best.epoch}, step {best.step}"
        shown[weights] = metrics["test"]
    return shown


@contextmanager
def _resume_hint_at_the_end(args: Command, trainer: Any) -> Iterator[None]:
    """Adds the command that resumes the run to whatever ends it."""
    from jax_trainer.runs import OtherRunError, resumable_step

    def hint() -> tuple[str, str]:
        if (folder := trainer.folder) is None or (step := resumable_step(folder)) is None:
            return "" if folder is None else args.redacted(str(folder.path)), "Nothing was saved."
        run = args.redacted(str(folder.path))
        return run, f"Resume from step {step} with `{_command(args, 'resume', run)}`."

    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code, (run, text) = interrupting_code(end), hint()
        raise Interrupted(code, f"Interrupted. {text}", run) from None
    except OtherRunError as error:
        raise WrongInput(str(error)) from None
    except Exception as error:
        if trainer.folder is not None:
            error.add_note(f"Run folder: {trainer.folder.path}. {hint()[1]}")
        elif isinstance(error, OSError):
            reason = f"{error.strerror}: {str(error.filename)[:200]}." if error.strerror else str(error)
            raise WrongInput(f"Cannot create the run folder. {reason}") from None
        raise


def _command(args: Command, name: str, path: str) -> str:
    return shlex.join(["jax-trainer", name, path, *args.import_words])
