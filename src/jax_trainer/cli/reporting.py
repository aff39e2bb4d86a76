"""Commands that look at run folders. They run before JAX is imported."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.output import tame
from jax_trainer.reports import report as report_of


def report(args: argparse.Namespace) -> Outcome:
    """Write one HTML page about one or several runs."""
    file = Path(args.output)
    if file.suffix.lower() not in (".html", ".htm") or file.is_dir():
        raise WrongInput(f"--output must be an .html file, found {args.output!r}.")
    try:
        made = report_of(*args.folders)
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None
    try:
        made.save(file)
    except (OSError, ValueError) as error:
        raise Failure(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    size, names = file.stat().st_size, [run["name"] for run in made.data["runs"]]

    def show(console: Console) -> None:
        for note in made.notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        what = names[0] if len(names) == 1 else f"{len(names)} runs"
        line = f"Report of {what}: {tame(str(file))} ({size / 1e6:.2f} MB). Open it in a browser; it needs no network."
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    data = {"status": "completed", "report": str(file.absolute()), "bytes": size, "runs": names, "notes": made.notes}
    return Outcome(data, show)


LIGHT_COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {"report": report}
