"""The command `time`: where the time of a run went."""

import argparse
from pathlib import Path

from jax_trainer.cli import tables
from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.runs import TIMES, TimeReport, run_and_step


def time(args: argparse.Namespace) -> Outcome:
    """Show where the time of a run went, by phase and over all starts, and what to change.

    "repeated" are seconds after the last checkpoint of a start that ended early: the next start did that work again.
    """
    try:
        folder = run_and_step(Path(args.folder))[0]
    except (OSError, ValueError) as problem:
        raise WrongInput(str(problem)) from None
    try:
        report = TimeReport.of(folder.path / TIMES)
    except FileNotFoundError:
        raise WrongInput(
            f"{folder.path} has no {TIMES}: its run has not started, or an earlier version wrote it."
        ) from None
    except (OSError, ValueError) as problem:
        raise Failure(str(problem)) from None
    return Outcome(report.data(), lambda console: tables.times(console, report))
