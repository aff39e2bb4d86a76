"""The command `export`: a checkpoint of a run as StableHLO, safetensors or a Hugging Face folder."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.cli.predicting import loaded_trainer
from jax_trainer.config import redact
from jax_trainer.exporting import ExportError, export_run
from jax_trainer.output import short_path
from jax_trainer.pretrained.importing import imported_parts

DEFAULT = "export"  # folder inside of the run


def export(args: argparse.Namespace) -> Outcome:
    """Write a checkpoint of a run in formats that need neither this library nor the code of the run."""
    trainer, source, saved = loaded_trainer(args, imported_parts)
    output = source.folder.path / DEFAULT if args.output is None else Path(args.output)
    options = {"weights": args.weights, "batch": args.batch, "tolerance": args.tolerance, "verify": not args.no_check}
    platforms = {} if args.platforms is None else {"platforms": args.platforms}
    try:
        done = export_run(trainer, output, args.to, **options, **platforms, saved=saved)
    except ExportError as error:  # a `ValueError`, like wrong arguments
        raise Failure(str(error)) from None
    except ModuleNotFoundError as error:
        raise Failure(str(error)) from None
    except (FileExistsError, ValueError) as error:
        raise WrongInput(str(error)) from None
    run, path = (redact(str(one), secrets=args.secrets) for one in (source.folder.path, done.path))
    data = {"status": "completed", "run": run, "which": source.which, "path": path, "formats": args.to}
    data |= {"inputs": list(done.inputs), "outputs": list(done.outputs)}
    data |= {"checks": {name: asdict(one) for name, one in done.checks.items()}}

    def show(console: Any) -> None:
        def line(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        line(f"{'; '.join(done.inputs)} → {'; '.join(done.outputs)}")
        for name, one in done.checks.items():
            line(f"{name}: differs from the trainer by at most {one.difference:.3g} on {one.examples} examples")
        line(f"{', '.join(args.to)} → {short_path(path)}{'' if done.checks else ', not checked'}")

    return Outcome(data, show)
