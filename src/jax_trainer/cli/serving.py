"""The command `serve`: an exported model over HTTP. It imports no part of the library that trains."""

import argparse
import json
import sys
from dataclasses import fields

from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.serving import ExportedModel, ExportError, ServeConfig
from jax_trainer.serving import serve as serve_export


def serve(args: argparse.Namespace) -> Outcome:
    """Serve an exported model over HTTP, until SIGTERM or Ctrl-C."""
    limits = {one.name: getattr(args, one.name, None) for one in fields(ServeConfig)}
    config = ServeConfig(**{name: value for name, value in limits.items() if value is not None})

    def on_start(address: str, model: ExportedModel) -> None:
        shown = json.dumps({"status": "serving", "address": address}) if args.json else f"{model} at {address}"
        if not args.quiet:
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()

    try:
        done = serve_export(args.path, host=args.host, port=args.port, config=config, on_start=on_start)
    except (ExportError, FileNotFoundError) as error:
        raise WrongInput(str(error)) from None
    except (OSError, ModuleNotFoundError) as error:
        raise Failure(error.strerror if isinstance(error, OSError) and error.strerror else str(error)) from None
    data = {"status": "stopped", "requests": done.requests, "examples": done.examples, "failed": done.failed}
    text = f"{done.requests:,} requests, {done.examples:,} examples, {done.failed:,} refused or failed"
    return Outcome(data, lambda console: console.print(text, markup=False, highlight=False))
