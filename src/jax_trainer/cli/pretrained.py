"""The command `import`: pretrained weights as a run folder."""

import argparse
from typing import Any

from jax_trainer.cli.commands import changes_of
from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.config import as_data, redact
from jax_trainer.pretrained import PretrainedError, import_pretrained


def import_(args: argparse.Namespace) -> Outcome:
    """Write pretrained weights as a run folder."""
    changes = changes_of(args)
    try:
        done = import_pretrained(args.path, args.output, args.mapping, overrides=changes, dtype=args.dtype)
    except (PretrainedError, FileNotFoundError, FileExistsError) as error:
        raise WrongInput(str(error)) from None
    except ModuleNotFoundError as error:
        raise Failure(str(error)) from None
    run, model = redact(str(done.folder.path), secrets=args.secrets), as_data(done.config)
    data = {"status": "completed", "run": run, "mapping": done.mapping, "dtype": args.dtype}
    data |= {"model": model, "parameters": done.parameters}

    def show(console: Any) -> None:
        text = f"{model['class_name']}, {done.parameters:,} parameters, by the mapping {done.mapping} → {run}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"Start a training from it: `trainer.init_from={run}`", markup=False, soft_wrap=True)

    return Outcome(data, show)
