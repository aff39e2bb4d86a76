"""What a command is: a class with its help, its arguments and its function. Nothing here imports JAX."""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from jax_trainer.config import redact
from jax_trainer.config.describing import help_of
from jax_trainer.tools.cli.outcomes import Outcome


def option(metavar: str | None = None, type: Any = None, default: Any = None, *, names: str = "", **more: Any) -> Any:
    """An option; `names` are as in "-o --output", by default that of the field."""
    options = {"metavar": metavar, "type": type, "default": default, **more}
    return SimpleNamespace(names=names, options={name: one for name, one in options.items() if one is not None})


def flag() -> Any:
    """An option without a value."""
    return option(default=False, action="store_true")


def positional(metavar: str, **more: Any) -> Any:
    """An argument without a name."""
    return SimpleNamespace(names=None, options={"metavar": metavar, **more})


class Command(argparse.Namespace):
    """A command, with its parsed arguments.

    A class derives from it whose docstring is the help: a description, a line for each argument under `Args:`, and two
    `Examples:`. Its fields are the arguments, after those of its bases, and `run` does the work. Its name is that of
    the class, or `name`. What needs JAX is imported by the functions.
    """

    summary: str  # the line in the list of commands
    is_light = False  # needs neither JAX nor code of the user
    starts_devices = False  # uses them as soon as the data is loaded
    trains = False  # has succeeded even if its output cannot be written
    group: tuple[str, str]  # the title and description of the arguments of a base, if they have one

    command: str
    imports: list[str]
    quiet: bool
    json: bool
    secrets: set[str]  # texts to hide
    error: Callable[[str], Any]  # raises a `WrongInput` with a hint at the help

    def __init_subclass__(cls, name: str = "") -> None:
        if "run" in vars(cls):
            COMMANDS[name or cls.__name__.lower()] = cls

    def run(self) -> Outcome:
        """Does what the command is for."""
        raise NotImplementedError

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments that the class declares."""
        texts, added = help_of(cls), set()
        for one in reversed(cls.__mro__):
            group: Any = parser.add_argument_group(*vars(one)["group"]) if "group" in vars(one) else parser
            for field in vars(one):
                argument = getattr(cls, field)  # may replace that of the base
                if isinstance(argument, SimpleNamespace) and field not in added:
                    added.add(field)
                    default = f"--{field.replace('_', '-')}"
                    names = [field] if argument.names is None else argument.names.split() or [default]
                    group.add_argument(*names, help=texts[field], **argument.options)

    @property
    def import_words(self) -> list[str]:
        """The options `--import` of this command, for another one."""
        return [word for name in self.imports for word in ("--import", name)]

    def redacted(self, data: Any) -> Any:
        """Data or a text without secrets."""
        return redact(data, secrets=self.secrets)


COMMANDS: dict[str, type[Command]] = {}  # by name; those of the imported files


def integer(least: int, most: int = 10**9 - 1) -> Callable[[str], int]:
    """The type of an argument that is an integer."""

    def parse(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,9}", text) and least <= int(text) <= most:
            return int(text)
        above = f"from {least} to {most}" if most < 10**9 - 1 else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"expected an integer {above}, found {text[:40]!r}.")

    return parse


def seconds(least: float, most: float = 86400) -> Callable[[str], float]:
    """The type of an argument that is a time in seconds."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if least <= float(text) <= most:
                return float(text)
        raise argparse.ArgumentTypeError(f"expected seconds, from {least:g} to {most:g}, found {text[:40]!r}.")

    return parse


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is a list of some of the `known` names, separated by commas."""

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {unknown[0][:40]!r}.")
        return list(dict.fromkeys(words))

    return parse


def checkpoint(text: str) -> str | int:
    """The type of an argument that names a checkpoint of a run."""
    if text in ("best", "latest", "last"):
        return "latest" if text == "last" else text
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected best, latest or a step, found {text[:40]!r}.")


CHANGES = positional("KEY=VALUE | FILE.py", nargs="*", default=[])
HEARTBEAT = 30.0  # seconds; of `jax_trainer.sharding`, which needs JAX


class OfConfig(Command):
    """The arguments of a command for an experiment.

    Args:
        config: YAML file of the experiment, or the name of a ready configuration, such as digits
        changes: overrides of configuration values, such as trainer.train_epochs=3, and .py files that register your own
            classes
    """

    config: str = positional("CONFIG")
    changes: list[str] = CHANGES


class OfRun(Command):
    """The arguments of a command that uses the stored configuration of a run.

    Args:
        folder: run folder, or a checkpoint folder inside it
        changes: overrides of configuration values, such as dataset.global_batch_size=256, and .py files that register
            your own classes
    """

    folder: str = positional("RUN")
    changes: list[str] = CHANGES


class OfProcesses(Command):
    """The arguments of a command that can be one of several processes.

    Args:
        distributed: call `jax.distributed.initialize`: on (SLURM, Open MPI, Kubernetes, TPU), off, or auto (only under
            SLURM and Open MPI; default)
        coordinator: address of process 0
        processes: number of processes
        process: index of this process, from 0
        heartbeat: timeout after which a process without heartbeats is considered dead, and the others exit (default:
            30)
    """

    group = ("multiple processes", "run the same command in each process; on one machine, see `jax-trainer launch`")
    distributed: str = option(default="auto", choices=("auto", "on", "off"))
    coordinator: str | None = option("HOST:PORT")
    processes: int | None = option("N", int)
    process: int | None = option("I", int)
    heartbeat: float = option("SECONDS", seconds(2), HEARTBEAT)
