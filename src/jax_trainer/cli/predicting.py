"""The command `predict`: predictions of a run's checkpoint, written to a file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_trainer.cli import commands
from jax_trainer.cli.outcomes import CTRL_C, Interrupted, Outcome, WrongInput
from jax_trainer.config import redact
from jax_trainer.datasets.order import Ordered
from jax_trainer.output import short_path


def predict(args: argparse.Namespace) -> Outcome:
    """Write the predictions for a split of the dataset of a run to a file; by default of the best checkpoint."""
    trainer, source, _ = loaded_trainer(args)
    loader = getattr(trainer.dataset, f"{args.split}_loader")
    if loader is None:
        raise WrongInput(f"The dataset of {source.folder.path} has no {args.split} data. Use another `--split`.")
    # all training examples, once: their loader shuffles them, and drops the last ones
    data = loader.in_order() if isinstance(loader, Ordered) else loader
    trainer.config.enable_progress_bar &= not (args.quiet or args.json)
    options = {"max_batches": args.max_batches, "targets": args.targets, "overwrite": args.overwrite}
    try:
        done = trainer.predict(data, output=Path(args.output), **options)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        raise WrongInput(str(error)) from None
    except KeyboardInterrupt:
        raise Interrupted(CTRL_C, "Interrupted. The same command continues where it was.", args.output) from None
    run, file = (redact(str(path), secrets=args.secrets) for path in (source.folder.path, done.path))
    data = {"status": "completed", "run": run, "which": source.which, "split": args.split, "file": file}
    data |= {"rows": done.rows, "columns": list(done.columns), "resumed": done.resumed}
    text = f"{done.rows:,} rows ({', '.join(done.columns)}) → {short_path(file)}"
    text += f", of which {done.resumed:,} were there already" if done.resumed else ""
    return Outcome(data, lambda console: console.print(text, markup=False, highlight=False, soft_wrap=True))


def loaded_trainer(
    args: argparse.Namespace, parts_for: Callable[[Path], dict[str, Any]] = lambda folder: {}
) -> tuple[Any, commands.RunSelector, Any]:
    """The trainer of RUN with the weights of `--which`, the run and checkpoint that were selected, and the latter.

    Args:
        args: of the command.
        parts_for: returns what a run without data needs instead, see `build`; nothing: it needs its dataset.
    """
    changes, source = commands.changes_of(args), commands.select_run(args, "best")
    parts = parts_for(source.folder.path)
    loaded = commands.stored(source, changes, needs_data=not parts)
    source.check_saved()
    with commands.located_errors(args, loaded):
        trainer = commands.built(loaded, source.folder, **parts)
        saved = trainer.load_model(which=source.which)
    return trainer, source, saved
