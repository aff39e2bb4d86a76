"""Fills in the reference pages from the package itself, so that they cannot be out of date.

A page asks for a part of the reference by a comment on a line of its own:

    <!-- reference: api jax_trainer.core -->             the public names of a module
    <!-- reference: configuration OptimizerInterface --> every registered class of an interface, with its keys
    <!-- reference: cli -->                              the help of every command
    <!-- reference: options -->                          the options of a training, and what the styles make of them
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax_trainer
from jax_trainer.config.describing import keys_of
from jax_trainer.runs import options
from jax_trainer.runs.vocabulary import REFUSED, WORDS

cli = importlib.import_module("jax_trainer.tools.cli.main")  # the package exports a function of the same name
# reads the signatures of optax, whose defaults autodoc replaces by their text
importlib.import_module("jax_trainer.optimizer.named")

_MARK = re.compile(r"^<!-- reference: (\w+) ?(.*?) *-->$", re.MULTILINE)
# modules that are no packages and have names for users
_MODULES = (
    *("config.settings", "core.random", "datasets.examples", "models.generative", "models.pretrained", "tools.cli"),
    *("tools.exporting", "tools.launching", "tools.pretrained", "tools.reports", "tools.tuning"),
)


def filled_in(text: str) -> str:
    """The Markdown of a page, with each part of the reference that it asks for."""
    return _MARK.sub(lambda match: _PARTS[match[1]](*match[2].split()), text)


@cache
def api_modules() -> tuple[str, ...]:
    """Every module whose names are public: `jax_trainer`, its packages, and a few modules."""
    found = [one.name for one in pkgutil.iter_modules(jax_trainer.__path__) if one.ispkg]
    packages = [name for name in found if hasattr(importlib.import_module(f"jax_trainer.{name}"), "__all__")]
    return ("jax_trainer", *sorted(f"jax_trainer.{name}" for name in (*packages, *_MODULES)))


def public_names(module: ModuleType) -> list[str]:
    """`__all__` of a module; of one without it, what it defines itself."""
    own = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
    ]
    return sorted(set(getattr(module, "__all__", own)) - {"__version__"}, key=str.lower)


@cache
def _homes() -> dict[Any, str]:
    """The module on whose page a class or function is documented: the nearest to its definition that exports it."""
    homes: dict[Any, str] = {}
    for name in sorted(api_modules(), key=lambda name: name.count(".")):
        module = importlib.import_module(name)
        for thing in (getattr(module, public) for public in public_names(module)):
            is_nearest = f"{getattr(thing, '__module__', '')}.".startswith(f"{name}.")
            if _has_docstring(thing) and (is_nearest or homes.get(thing) in (None, "jax_trainer")):
                homes[thing] = name
    return homes


def _api(module_name: str) -> str:
    module = importlib.import_module(module_name)
    things = {name: getattr(module, name) for name in public_names(module)}
    paths = {
        name: f"{_homes()[thing] if _has_docstring(thing) else module_name}.{name}" for name, thing in things.items()
    }
    rows = (f"| {_linked(paths[name], thing)} | {_cell(_summary(thing))} |" for name, thing in things.items())
    parts = [_rst(inspect.cleandoc(module.__doc__ or "")), _wide("| name | |", "|---|---|", *rows)]
    here = {paths[name]: thing for name, thing in things.items() if paths[name] == f"{module_name}.{name}"}
    here |= _only_in_submodules(things.values())
    for title, has_kind, directive in _KINDS:
        documented = [_rst(directive(path, thing)) for path, thing in here.items() if has_kind(thing)]
        if documented:
            parts.append("\n\n".join((f"## {title}", *documented)))
    return "\n\n".join(parts)


def _only_in_submodules(things: Iterable[Any]) -> dict[str, Any]:
    """What an exported module without a page of its own defines, and no package exports."""
    modules = [thing for thing in things if inspect.ismodule(thing) and thing.__name__ not in api_modules()]
    defined = {
        f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in public_names(module)
    }
    return {path: thing for path, thing in defined.items() if _has_docstring(thing) and thing not in _homes()}


def _has_docstring(thing: Any) -> bool:
    """Whether it is a class or function of ours; names for other packages' classes are shown as constants."""
    is_ours = (getattr(thing, "__module__", None) or "").startswith("jax_trainer")
    return is_ours and (inspect.isclass(thing) or inspect.isroutine(thing))


def _is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def _is_data(thing: Any) -> bool:
    return not _has_docstring(thing) and not inspect.ismodule(thing)


def _data(path: str, value: Any) -> str:
    """A constant, or a name for a type; of long values the beginning."""
    module, _, name = path.rpartition(".")
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(value) if type(value).__module__ in _TYPING else repr(value))
    shown = f"\n   :value: {text if len(text) <= 100 else text[:100] + '…'}" if type(value) is not object else ""
    return f".. py:data:: {name}\n   :module: {module}{shown}"


_TYPING = ("types", "typing", "collections.abc")
_KINDS: Sequence[tuple[str, Callable[[Any], bool], Callable[[str, Any], str]]] = (
    ("Functions", inspect.isroutine, lambda path, _: f".. autofunction:: {path}"),
    (
        "Classes",
        lambda thing: inspect.isclass(thing) and _has_docstring(thing) and not _is_error(thing),
        lambda path, _: f".. autoclass:: {path}\n   :members:\n   :exclude-members: factory",  # of optax
    ),
    ("Exceptions and warnings", _is_error, lambda path, _: f".. autoexception:: {path}"),
    ("Constants and types", _is_data, _data),
)


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def _linked(path: str, thing: Any) -> str:
    name = path.rpartition(".")[2]
    if not inspect.ismodule(thing):
        return f"{{py:obj}}`{name} <{path}>`"
    page = thing.__name__.removeprefix("jax_trainer.")
    return f"[`{name}`]({page}.md)" if thing.__name__ in api_modules() else f"`{name}`"


def _summary(thing: Any) -> str:
    text = "" if _is_data(thing) else inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return " ".join(text.partition("\n\n")[0].split())


@cache
def described() -> tuple[dict[str, Any], ...]:
    """Every class that a configuration can name, as `jax-trainer describe --json` prints it."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = cli.main(["describe", "--json"])
    if code:
        raise RuntimeError(f"`jax-trainer describe --json` ended with the exit code {code}.")
    return tuple(json.loads(shown.getvalue())["classes"])


def _configuration(*interfaces: str) -> str:
    parts, heading = [], "###" if len(interfaces) > 1 else "##"
    for interface in interfaces:
        classes = [one for one in described() if one["interface"] == interface]
        if not classes:
            raise ValueError(f"No class is registered for {interface}.")
        common = _common(classes)
        if len(interfaces) > 1:
            parts.append(f"## `{interface}`")
        if common:
            parts.append(f"{heading} Keys of every class\n\n{_table(common)}")
        parts.extend(_class(one, common, heading) for one in classes)
    return "\n\n".join(parts)


def _common(classes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The keys that all classes have, with the same default; worth a table of its own if there are several."""
    first, *others = classes
    shared = [key for key in first["keys"] if all(key in other["keys"] for other in others)]
    return shared if len(others) > 1 and len(shared) > 1 else []


def _class(one: dict[str, Any], common: Sequence[dict[str, Any]], heading: str) -> str:
    own = [key for key in one["keys"] if key not in common]
    nothing = "No other keys." if common else "No keys."
    return f"{heading} {one['name']}\n\n{_escaped(one['summary'])}\n\n{_table(own) if own else nothing}"


def _table(keys: Sequence[dict[str, Any]]) -> str:
    rows = (f"| `{key['name']}` | {_cell(key['expects'])} | {_default(key)} | {_cell(key['help'])} |" for key in keys)
    return _wide("| key | type | default | meaning |", "|---|---|---|---|", *rows)


def _default(key: dict[str, Any]) -> str:
    if key["required"]:
        return "required"
    value = key["default"]
    if isinstance(value, dict) and "class_name" in value:
        value = f"{{class_name: {value['class_name']}, …}}"
    elif not isinstance(value, str) or not value:
        value = json.dumps(value, ensure_ascii=False)
    return f"`{value}`".replace("|", "\\|")


def _wide(*lines: str) -> str:
    """A table whose first column is never broken."""
    return "\n".join((":::{container} names", *lines, ":::"))


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text in which only `code` is markup."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>\[\]{}$])", r"\\\1", p) for p in pieces)


def _cli() -> str:
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        return "\n\n".join(f"## {title}\n\n```text\n{text.rstrip()}\n```" for title, text in _helps(cli.parser()))
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width


def _helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    yield parser.prog, parser.format_help()
    for action in parser._actions:  # argparse has no public way to its commands
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{parser.prog} {name}", command.format_help()


def _options() -> str:
    """Every option by section, the words of the styles, and what a style cannot honour."""
    parts = []
    for section in options.SECTIONS:
        rows = (f"| `{key.name}` | `{key.default!r}` | {_cell(key.help)} |" for key in keys_of(section))
        parts.append(
            f"## {section.__name__}\n\n{(inspect.getdoc(section) or '').partition(chr(10))[0]}\n\n"
            + _wide("| option | default | |", "|---|---|---|", *rows)
        )
    words = (f"| `{style}` | `{word}` | `{name}` |" for style, own in WORDS.items() for word, name in own.items())
    parts.append("## Words of a style\n\n" + _wide("| style | its word | option |", "|---|---|---|", *words))
    refused = (
        f"| `{name}` | `{style}` | {_cell(text)} |" for style, own in REFUSED.items() for name, text in own.items()
    )
    parts.append("## Refused\n\n" + _wide("| option | style | because |", "|---|---|---|", *refused))
    return "\n\n".join(parts)


_PARTS: dict[str, Callable[..., str]] = {
    "api": _api,
    "configuration": _configuration,
    "cli": _cli,
    "options": _options,
}


def _fill_in(app: Any, page: str, source: list[str]) -> None:
    source[0] = filled_in(source[0])


def _outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Generated pages are read anew in every build: the package may have changed."""
    return [page for page in env.found_docs if _MARK.search(Path(env.doc2path(page)).read_text(encoding="utf-8"))]


def _without_noise(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    if lines and lines[0].startswith("Alias for field number"):  # of a NamedTuple
        lines.clear()


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("source-read", _fill_in)
    app.connect("env-get-outdated", _outdated)
    app.connect("autodoc-process-docstring", _without_noise)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
