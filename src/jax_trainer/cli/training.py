"""The commands `train` and `resume`: where a run begins or goes on, and what is said when it ends early."""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.info import CheckpointInfo, checkpoint_infos
from jax_trainer.cli import commands, tables
from jax_trainer.cli.outcomes import Interrupted, Outcome, WrongInput, interrupting_code
from jax_trainer.cli.runs import RunSelector, select_run, without_resume
from jax_trainer.config import Loaded, redact
from jax_trainer.runs import resumable_step
from jax_trainer.trainer import TrainResults, load_experiment


def train(asked: argparse.Namespace) -> Outcome:
    """Trains what a file describes, then tests the weights that were best in validation.

    With `resume=auto` the same command begins a run or goes on with it: with the newest of exactly this configuration.
    """
    changes, source = without_resume(commands.changes_of(asked))
    return _trained(asked, load_experiment(asked.config, changes), source)


def resume(asked: argparse.Namespace) -> Outcome:
    """Goes on with a run from one of its checkpoints, to the end that its configuration says."""
    changes, source = commands.changes_of(asked), select_run(asked, "latest")
    loaded = commands.stored(source, changes)
    return _trained(asked, loaded, source, fork=asked.fork)  # with other values, if there are any, from now on


def _trained(
    asked: argparse.Namespace,
    loaded: Loaded[Any],
    source: RunSelector | Literal["auto"] | None,
    *,
    fork: bool = False,
) -> Outcome:
    own = source.folder if isinstance(source, RunSelector) and not fork else None
    if own is not None:
        own.check_free()  # before the data is loaded
    if isinstance(source, RunSelector):
        source.check_saved()
    with commands.told_with_places(asked, loaded):
        loaded.value.trainer.check_limited()  # before the data is loaded
        trainer = commands.built(loaded, own)
        data, quiet = trainer.dataset, asked.quiet or asked.json
        start = source.path(trainer) if isinstance(source, RunSelector) else source or False
        with _told_with_a_way_on(asked, trainer):
            results = trainer.train_model(
                data.train_loader, data.val_loader, data.test_loader, resume=start, fork=fork, quiet=quiet
            )
    metrics = {str(place): commands.scalars(values) for place, values in results.items()}
    run = redact(str(trainer.folder.path), secrets=asked.secrets)
    following = _command(asked, "test", trainer.folder) if _saved(trainer.folder) else ""
    best, tested = results.best, results.tested
    chosen = {"best": None if best is None else best.data(), "tested": tested}
    validations = [
        {"epoch": one.epoch, "step": one.step, "metrics": commands.scalars(one.metrics)} for one in results.validations
    ]
    outcome = {"status": "completed", "reason": results.reason, "run": run, "metrics": metrics, **chosen}
    outcome["validations"] = validations
    shown = _by_weights(results, metrics)
    return Outcome(outcome, lambda console: tables.trained(console, shown, best, run, following))


def _by_weights(results: TrainResults, metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The metrics of the last validation and of the test, by the weights that they are of."""
    shown: dict[str, dict[str, float]] = {}
    if results.validations:
        last = results.validations[-1]
        shown[f"epoch {last.epoch}, step {last.step}"] = metrics[str(last.epoch)]
    if results.tested == "best" and results.best is not None:
        shown[f"the best weights: epoch {results.best.epoch}, step {results.best.step}"] = metrics["test"]
    elif results.tested is not None:
        shown["the last weights"] = metrics["test"]
    return shown


@contextmanager
def _told_with_a_way_on(asked: argparse.Namespace, trainer: Any) -> Iterator[None]:
    """Whatever ends a run, a person learns how to go on with it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = interrupting_code(end)
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
    step = None if folder is None else resumable_step(folder)
    if folder is None or step is None:
        return "Nothing was saved."
    return f"Go on from step {step} by `{_command(asked, 'resume', folder)}`."


def _saved(folder: RunFolder) -> list[CheckpointInfo]:
    """The checkpoints of a run that look whole; what is damaged fails here no second time."""
    # without asking the other processes, which may be gone
    return [one for one in checkpoint_infos(folder.checkpoints) if not one.problem]


def _command(asked: argparse.Namespace, name: str, folder: RunFolder) -> str:
    path = redact(str(folder.path), secrets=asked.secrets)
    return shlex.join(["jax-trainer", name, path, *commands.imports_of(asked)])
