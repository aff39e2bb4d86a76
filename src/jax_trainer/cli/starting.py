"""What a first training starts from: the list of ready configurations. It imports no JAX."""

import argparse
from dataclasses import asdict

from rich.console import Console

from jax_trainer.cli.outcomes import Outcome
from jax_trainer.config.ready import FOLDER, ReadyConfig


def is_listing(args: argparse.Namespace) -> bool:
    """Whether this is `jax-trainer train` without a file."""
    return args.command == "train" and args.config is None


def ready(args: argparse.Namespace) -> Outcome:
    """List the configurations that ship with the package, one line each."""
    found = [ReadyConfig.of(file) for file in sorted(FOLDER.glob("*.yaml"))]

    def show(console: Console) -> None:
        width = max(len(one.name) for one in found)
        lines = [
            f"{one.name:{width}}  {one.summary}. Data: {one.data}. Device: {one.device}. Expected: {one.expected}."
            for one in found
        ]
        following = "Next: `jax-trainer train digits`, or your own: `jax-trainer init my_project --task image`."
        for line in (*lines, "", following, f"Files to copy: {FOLDER}"):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return Outcome({"status": "completed", "configs": [asdict(one) for one in found]}, show)
