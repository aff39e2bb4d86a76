"""Runs a parsed command; imports JAX and all commands."""

import argparse
from collections.abc import Callable

from jax_trainer.checkpoint.lock import RunInUseError
from jax_trainer.checkpoint.store import CheckpointError, SaveError
from jax_trainer.cli.checkpoints import ckpt
from jax_trainer.cli.commands import check, describe, lr_find, schema
from jax_trainer.cli.cross_validating import cv
from jax_trainer.cli.evaluating import eval_, test
from jax_trainer.cli.exporting import export
from jax_trainer.cli.launch import join_others, launch, leave_others
from jax_trainer.cli.outcomes import Failure, Outcome
from jax_trainer.cli.predicting import predict
from jax_trainer.cli.pretrained import import_
from jax_trainer.cli.time import time
from jax_trainer.cli.training import resume, train
from jax_trainer.cli.tuning import tune
from jax_trainer.core import NonFiniteError
from jax_trainer.core.indices import IndexRangeError
from jax_trainer.datasets import DataError
from jax_trainer.multihost import LOST, ProcessLostError

COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    command.__name__.rstrip("_").replace("_", "-"): command
    for command in (
        train,
        check,
        lr_find,
        test,
        eval_,
        predict,
        export,
        resume,
        ckpt,
        time,
        describe,
        schema,
        import_,
        launch,
        cv,
        tune,
    )
}

__all__ = ["COMMANDS", "join_others", "leave_others", "run"]


def run(args: argparse.Namespace) -> Outcome:
    """Runs the command; an error that explains itself is raised as a `Failure`, which is shown without a traceback."""
    try:
        return COMMANDS[args.command](args)
    except (SaveError, NonFiniteError, DataError, IndexRangeError) as error:  # the notes name the run or the batch
        raise Failure(" ".join((str(error), *getattr(error, "__notes__", ())))) from error
    except (CheckpointError, RunInUseError) as error:
        raise Failure(str(error)) from error
    except ProcessLostError as error:
        raise Failure(" ".join((str(error), *getattr(error, "__notes__", ()))), LOST) from error
