"""The command `cv`."""

import argparse
from pathlib import Path

from jax_trainer.cli import commands, tables
from jax_trainer.cli.outcomes import Failure, Interrupted, Outcome, WrongInput, interrupting_code
from jax_trainer.config import redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.redaction import secret_values
from jax_trainer.trainer import CrossValidationError, cross_validate
from jax_trainer.trainer.cross_validation import folder_of


def cv(args: argparse.Namespace) -> Outcome:
    """Cross-validate an experiment: one run per fold. Run the command again to resume."""
    changes = commands.changes_of(args)
    args.secrets |= secret_values(read_tree(Path(args.config), changes, Problems()).data())
    if args.folds < 2:
        raise WrongInput(f"--folds must be at least 2, got {args.folds}.")
    options = {"seed": args.seed, "stratify": False if args.no_stratify else None, "folder": args.folder}
    try:
        result = cross_validate(args.config, args.folds, overrides=changes, quiet=args.quiet or args.json, **options)
    except (KeyboardInterrupt, SystemExit) as end:
        code, folder = interrupting_code(end), redact(str(folder_of(args.config, args.folder)), secrets=args.secrets)
        raise Interrupted(code, f"Interrupted. The same command resumes the folds in {folder}.", folder) from None
    except CrossValidationError as error:
        raise WrongInput(str(error)) from None
    except OSError as error:
        raise Failure(str(error)) from None
    data = redact({"status": "completed", **result.data()}, secrets=args.secrets)
    return Outcome(data, lambda console: tables.folds(console, result))
