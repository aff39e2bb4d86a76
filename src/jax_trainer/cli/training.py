"""The commands `train` and `resume`, and how to resume a run that ended early."""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import CheckpointInfo, checkpoint_infos
from jax_trainer.cli import commands, tables
from jax_trainer.cli.commands import RunSelector, select_run, without_allowed, without_resume
from jax_trainer.cli.outcomes import Interrupted, Outcome, WrongInput, interrupting_code
from jax_trainer.config import Loaded, redact
from jax_trainer.core.ledger import imported
from jax_trainer.output import short_path
from jax_trainer.runs import OtherRunError, resumable_step
from jax_trainer.trainer import TrainResults, load_experiment


def train(args: argparse.Namespace) -> Outcome:
    """Train the experiment of a YAML file, then test the checkpoint with the best validation metric."""
    imported()
    changes, allowed = without_allowed(commands.changes_of(args))
    changes, source = without_resume(changes)
    return _trained(args, load_experiment(args.config, changes), source, allowed)


def resume(args: argparse.Namespace) -> Outcome:
    """Resume a run from one of its checkpoints, until the limits of its configuration."""
    imported()
    changes, allowed = without_allowed(commands.changes_of(args))
    source = select_run(args, "latest")
    return _trained(args, commands.stored(source, changes), source, allowed, fork=args.fork)


def _trained(
    args: argparse.Namespace,
    loaded: Loaded[Any],
    source: RunSelector | Literal["auto"] | None,
    allowed: list[str],
    *,
    fork: bool = False,
) -> Outcome:
    own = source.folder if isinstance(source, RunSelector) and not fork else None
    if own is not None:
        own.check_free()  # before the data is loaded
    if isinstance(source, RunSelector):
        source.check_saved()
    with commands.located_errors(args, loaded):
        loaded.value.trainer.check_limited()  # before the data is loaded
        trainer = commands.built(loaded, own)
        data, quiet = trainer.dataset, args.quiet or args.json
        start = source.path(trainer) if isinstance(source, RunSelector) else source or False
        with _resume_hint_at_the_end(args, trainer):
            loaders = data.train_loader, data.val_loader, data.test_loader
            results = trainer.train_model(*loaders, resume=start, allow_changes=allowed, fork=fork, quiet=quiet)
    metrics = {str(name): commands.scalars(values) for name, values in results.items()}
    run = redact(str(trainer.folder.path), secrets=args.secrets)
    best, tested = results.best, results.tested
    chosen = {"best": None if best is None else best.data(), "tested": tested}
    validations = [
        {"epoch": one.epoch, "step": one.step, "metrics": commands.scalars(one.metrics)} for one in results.validations
    ]
    outcome = {"status": "completed", "reason": results.reason, "run": run, "metrics": metrics, **chosen}
    outcome |= {"validations": validations, "time": results.time.data()}
    saved = _saved(trainer.folder)
    lines = _lines(results, short_path(run), [one.step for one in saved])
    test = {shlex.join(["jax-trainer", "test", short_path(run), *commands.imports_of(args)]): "test the best weights"}
    report = {shlex.join(["jax-trainer", "report", short_path(run)]): "curves as an HTML page"}
    following = {**test, **report} if saved else report
    shown = _by_weights(results, metrics)
    return Outcome(outcome, lambda console: tables.trained(console, shown, lines, following))


def _lines(results: TrainResults, run: str, saved: list[int]) -> dict[str, str]:
    """Facts about a run that has ended: its best checkpoint, where its time went, and its folder."""
    lines, best = {}, results.best
    if best is not None and best.step in saved:
        lines["Best checkpoint"] = best.description
    elif best is not None:
        hint = "" if saved else ". The callback `ModelCheckpoint` saves them"
        lines["Best validation"] = f"{best.description}; its weights were not saved{hint}"
    return {**lines, "Time": results.time.line, "Run folder": run}


def _by_weights(results: TrainResults, metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The metrics of the last validation and of the test, by the weights that were evaluated."""
    shown: dict[str, dict[str, float]] = {}
    if results.validations:
        last = results.validations[-1]
        shown[f"last: epoch {last.epoch}, step {last.step}"] = metrics[str(last.epoch)]
    if results.tested == "best" and results.best is not None:
        shown[f"best: epoch {results.best.epoch}, step {results.best.step}"] = metrics["test"]
    elif results.tested is not None:
        shown["last weights"] = metrics["test"]
    return shown


@contextmanager
def _resume_hint_at_the_end(args: argparse.Namespace, trainer: Any) -> Iterator[None]:
    """Adds the command that resumes the run to whatever ends it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = interrupting_code(end)
        run = "" if trainer.folder is None else redact(str(trainer.folder.path), secrets=args.secrets)
        raise Interrupted(code, f"Interrupted. {_resume_hint(args, trainer.folder)}", run) from None
    except OtherRunError as error:
        raise WrongInput(str(error)) from None
    except Exception as error:
        if trainer.folder is not None:
            error.add_note(f"Run folder: {trainer.folder.path}. {_resume_hint(args, trainer.folder)}")
        elif isinstance(error, OSError):
            reason = f"{error.strerror}: {str(error.filename)[:200]}." if error.strerror else str(error)
            raise WrongInput(f"Cannot create the run folder. {reason}") from None
        raise


def _resume_hint(args: argparse.Namespace, folder: RunFolder | None) -> str:
    step = None if folder is None else resumable_step(folder)
    if folder is None or step is None:
        return "Nothing was saved."
    return f"Resume from step {step} with `{_command(args, 'resume', folder)}`."


def _saved(folder: RunFolder) -> list[CheckpointInfo]:
    """The usable checkpoints of a run."""
    # without synchronizing with the other processes, which may have exited
    return [one for one in checkpoint_infos(folder.checkpoints) if not one.problem]


def _command(args: argparse.Namespace, name: str, folder: RunFolder) -> str:
    path = redact(str(folder.path), secrets=args.secrets)
    return shlex.join(["jax-trainer", name, path, *commands.imports_of(args)])
