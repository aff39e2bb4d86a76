"""The parser of the command line. It imports nothing that needs JAX, whose import takes longer than a help text may."""

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, NoReturn

from jax_trainer.cli.command_arguments import add_arguments
from jax_trainer.cli.help_texts import DESCRIPTION, DESCRIPTIONS, EXAMPLES, EXIT_CODES, SUMMARIES
from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.suggestions import suggestion

_WITHOUT_USER_CODE = ("init", "runs", "diff", "report")


def version() -> str:
    """The installed version of the package."""
    try:
        return installed_version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0.0.0"


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in help texts, and raises `WrongInput` for wrong commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": kind, "allow_abbrev": False, **kwargs})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near = "" if action.choices is None or value in action.choices else suggestion(str(value), action.choices)
        if near:  # of a command: alone, there are many
            all_of_them = (
                "" if action.metavar == "COMMAND" else f" Choose from {', '.join(map(str, action.choices or ()))}."
            )
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}.{near}{all_of_them}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise WrongInput(f"{message.rstrip('.')}{end} Try `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    root = _Parser(prog="jax-trainer", description=DESCRIPTION, epilog=EXIT_CODES)
    root.add_argument("--version", action="version", version=f"jax-trainer {version()}")
    subparsers = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, summary in SUMMARIES.items():
        examples = "\n".join(f"  jax-trainer {words}" for words in EXAMPLES.get(name, ()))
        epilog = f"{EXIT_CODES}\nexamples:\n{examples}"
        one = subparsers.add_parser(name, help=summary, description=DESCRIPTIONS[name], epilog=epilog)
        one.set_defaults(command=name, error=one.error, secrets=set())
        if name not in _WITHOUT_USER_CODE:
            text = "import a module or .py file that registers your own classes; repeatable"
            one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=text)
        one.add_argument("-q", "--quiet", action="store_true", help="print errors only")
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        commands[name] = one
    add_arguments(commands)
    return root


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; raises `WrongInput` for wrong ones."""
    args, rest = parser().parse_known_args(arguments)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]  # values may be secrets
    positional = next((getattr(args, name) for name in ("changes", "names") if hasattr(args, name)), None)
    if unknown or (rest and positional is None):
        hint = " To override a value of the file, write `trainer.train_epochs=3`." if hasattr(args, "changes") else ""
        if unknown[:1] == ["--config"]:
            hint = " Pass the file without an option: `jax-trainer train experiment.yaml`."
        args.error(f"unknown option {unknown[0]}.{hint}" if unknown else f"unexpected argument: {len(rest)} too many.")
    if rest and positional is not None:  # argparse collects only consecutive positional arguments
        positional += rest
    return args
