"""`jax-trainer describe` and `schema`: what a configuration can name, for people and for editors."""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from jax_trainer.config import Described, Key, json_schema, keys_of, registered_classes
from jax_trainer.config.registration import missing_projects
from jax_trainer.config.settings import written
from jax_trainer.diagnostics.files import shown
from jax_trainer.diagnostics.suggestions import nearest
from jax_trainer.tools.cli.command import Command, positional
from jax_trainer.tools.cli.outcomes import Outcome, WrongInput, line


class Describe(Command):
    """Show a class that a configuration can name, with its keys; without NAME, an index of all classes.

    Your own classes are listed if their files are imported: `jax-trainer describe MyModel my_models.py`.

    Args:
        names: a class, or an interface such as Callback; .py files that register your own classes

    Examples:
        jax-trainer describe
        jax-trainer describe AdamW
    """

    summary = "list the classes that a file can name, and their keys"

    names: list[str] = positional("NAME | FILE.py", nargs="*", default=[])

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.selecting import import_all

        names = [word for word in self.names if not word.endswith(".py")]
        import_all([*self.imports, *(word for word in self.names if word.endswith(".py"))])
        if len(names) > 1:
            self.error(f"expected one NAME, got {len(names)}: {', '.join(map(shown, names))}.")
        wanted = names[0] if names else ""
        everything = [*_sections(), *registered_classes()]
        chosen = [one for one in everything if wanted in ("", one.name, one.interface)]
        if not chosen:
            known = {name for one in everything for name in (one.name, one.interface)}
            near = nearest(wanted, known)
            hint = f"Did you mean `{near}`?" if near else f"Available: {', '.join(sorted(known))}."
            raise WrongInput(f"Unknown class or interface {shown(wanted)}. {hint}{missing_projects()}")
        classes = [
            {"name": one.name, "interface": one.interface, "summary": one.summary, "keys": [*map(_key_data, one.keys)]}
            for one in chosen
        ]
        return Outcome({"classes": classes}, lambda console: _show(console, chosen, in_full=bool(wanted)))


def _sections() -> list[Described]:
    """The configuration sections that are not registered classes."""
    from jax_trainer.models.attention import RotaryScalingConfig
    from jax_trainer.models.pretrained import (
        ConfigRowConfig,
        InputConfig,
        MappingConfig,
        NumberingConfig,
        TensorRowConfig,
    )
    from jax_trainer.optimizer import GroupConfig
    from jax_trainer.trainer import EvalSetConfig, Experiment
    from jax_trainer.trainer.sections import (
        InitFromConfig,
        LoRAConfig,
        MeshConfig,
        RematConfig,
        ShardingConfig,
        ShardingRuleConfig,
    )

    of_mappings = (MappingConfig, TensorRowConfig, ConfigRowConfig, NumberingConfig, InputConfig)
    of_trainers = (Experiment, EvalSetConfig, InitFromConfig, MeshConfig, ShardingConfig, ShardingRuleConfig)
    found = (*of_trainers, LoRAConfig, RematConfig, GroupConfig, RotaryScalingConfig, *of_mappings)
    summaries = {one: (one.__doc__ or "").partition("\n")[0] for one in found}
    return [
        Described(one.__name__.removesuffix("Config"), "Section", text, keys_of(one)) for one, text in summaries.items()
    ]


def _key_data(key: Key) -> dict[str, Any]:
    default = {"required": key.is_required, "default": None if key.is_required else key.default}
    return {"name": key.name, "expects": key.expects, **default, "help": key.help}


def _show(console: Console, classes: list[Described], *, in_full: bool) -> None:
    """Classes by interface: one line each, or with their keys, which have a default, help, and accepted values."""
    for interface in dict.fromkeys(one.interface for one in classes):
        console.rule(escape(interface), align="left")
        index = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        for one in (one for one in classes if one.interface == interface):
            if in_full:
                _show_keys(console, one)
            else:
                index.add_row(f"  [bold]{escape(one.name)}[/bold]", escape(one.summary))
        if not in_full:
            console.print(index)
    if not in_full:
        line(console, "\n`jax-trainer describe NAME` shows the keys of a class, or of all classes of an interface.")


def _show_keys(console: Console, one: Described) -> None:
    console.print(f"[bold]{one.name}[/bold]  {escape(one.summary)}", highlight=False)
    for key in one.keys:
        is_json = isinstance(key.default, dict | list | tuple) or key.default == ""
        default = f": {escape(json.dumps(key.default) if is_json else written(key.default))}"
        first = f"[bold]{key.name}[/bold]{'  (required)' if key.is_required else default}"
        console.print(Padding(first, (0, 0, 0, 2), expand=False), highlight=False)
        text = f"{escape(key.help)} [dim]Expects {escape(key.expects)}.[/dim]"
        console.print(Padding(text, (0, 0, 0, 6), expand=False), highlight=False)
    console.print()


class Schema(Command):
    """Print the JSON Schema of configuration files, for validation and completion in editors.

    It contains your own classes if their files are imported: `jax-trainer schema --import my_models.py`.

    Examples:
        jax-trainer schema
        jax-trainer schema --import my_models.py
    """

    summary = "print the JSON Schema of configuration files, for editors"

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.selecting import import_all
        from jax_trainer.trainer import Experiment

        import_all(self.imports)
        document = json_schema(Experiment)
        return Outcome(document, lambda console: console.print_json(data=document))
