"""From written values to configurations: everything is checked, all problems are collected, nothing is guessed."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin

from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import ConfigProblem, suggestion
from jax_trainer.config.secrets import HIDDEN, is_secret
from jax_trainer.settings import SettingsError, config_classes, expected, fits, hints_of, listed, options

CLASS = "class_name"
INVALID = object()  # stands for a value with problems, which are written down already


class Checker:
    """Makes configurations out of nodes. `problems` has what was wrong with them."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []

    def make(self, hint: Any, node: Node, path: str, likely: str = "") -> Any:
        """The value of `node` where `hint` is the annotation; `likely` names the class if nothing else does."""
        classes = config_classes(hint)
        if classes and (node.is_section or (likely and node.value is None)):
            return self._configuration(hint, classes, node, path, likely)
        for option in map(_bare, options(hint)):
            if isinstance(node.value, list) and _is(option, Sequence):
                return self._list(option, hint, node, path)
            if node.is_section and _is(option, Mapping):
                item = get_args(option)[1]
                made = {name: self.make(item, part, f"{path}.{name}", name) for name, part in node.section.items()}
                return INVALID if any(value is INVALID for value in made.values()) else made
        return self._plain(hint, node, path)

    def _plain(self, hint: Any, node: Node, path: str) -> Any:
        value = node.data()
        if value == HIDDEN:
            return self._complain(node, path, f"a secret was hidden here when this was stored. Give it again: {path}=…")
        if not fits(hint, value):
            return self._complain(node, path, f"expected {expected(hint)}, found {self._shown(value, path)}.")
        kinds = [_bare(option) for option in options(hint)]
        return float(value) if type(value) is int and float in kinds and int not in kinds else value

    def _list(self, option: Any, hint: Any, node: Node, path: str) -> Any:
        assert isinstance(node.value, list)
        kinds, items = get_args(option), node.value
        if get_origin(option) is tuple and kinds[1:] != (...,):
            if len(kinds) != len(items):
                found = f"a list of {len(items)}"
                return self._complain(node, path, f"expected {expected(hint)}, found {found}.")
        else:
            kinds = tuple(itertools.repeat(kinds[0], len(items)))
        pairs = enumerate(zip(kinds, items, strict=True))
        made = [self.make(kind, item, f"{path}.{number}") for number, (kind, item) in pairs]
        if any(value is INVALID for value in made):
            return INVALID
        return tuple(made) if get_origin(option) is tuple else made

    def _configuration(self, hint: Any, classes: tuple[type, ...], node: Node, path: str, likely: str) -> Any:
        config = self._choose(hint, classes, node, path, likely)
        return INVALID if config is None else self.configuration(config, node, path)

    def configuration(self, config: type, node: Node, path: str) -> Any:
        """An instance of the dataclass `config` from the keys of a section."""
        before = len(self.problems)
        known = {field.name: field for field in fields(config) if field.init}
        hints = hints_of(config)
        made: dict[str, Any] = {}
        for name, part in node.section.items():
            if name == CLASS:
                continue
            if name not in known:
                self._unknown(config, known, name, part, _under(path, name))
            else:
                made[name] = self.make(hints[name], part, _under(path, name))
        for name, field in known.items():
            if _is_required(field) and name not in node.section:
                text = f"the key `{name}` is missing: expected {expected(hints[name])}."
                self._complain(node, _under(path, name), text)
        if len(self.problems) > before:
            return INVALID
        return self._construct(config, made, node, path)

    def _construct(self, config: type, made: dict[str, Any], node: Node, path: str) -> Any:
        try:
            return config(**made)
        except SettingsError as error:
            hints = hints_of(config)
            for key, text in error.problems:
                if is_secret(key):
                    text = f"expected {expected(hints.get(key, Any))}, found {HIDDEN}."
                self.problems.append(ConfigProblem(node.place_of(key), _under(path, key), text))
        except (ValueError, TypeError) as error:  # a configuration class of the user's, with checks of its own
            self._complain(node, path, str(error))
        return INVALID

    def _choose(self, hint: Any, classes: tuple[type, ...], node: Node, path: str, likely: str) -> type | None:
        by_name = {getattr(config, CLASS, "") or config.__name__: config for config in classes}
        named = node.section.get(CLASS)
        if named is not None:
            if isinstance(named.value, str) and named.value in by_name:
                return by_name[named.value]
            near = suggestion(named.value, by_name) if isinstance(named.value, str) else ""
            self._complain(
                named,
                _under(path, CLASS),
                f"expected one of {listed(by_name)}, found {self._shown(named.data(), CLASS)}.{near}"
                f"{_own_class_hint(named.value, near)}",
            )
            return None
        if likely in by_name:
            return by_name[likely]
        if len(classes) == 1:
            return classes[0]
        fitting = [name for name, config in by_name.items() if _could_be(config, node)]
        if len(fitting) == 1:
            return by_name[fitting[0]]
        names = ", ".join(sorted(fitting or by_name))
        why = (
            f"several classes have these keys: {names}"
            if fitting
            else f"no class has just these keys; there are {names}"
        )
        near = suggestion(likely, by_name) if likely else ""
        self._complain(node, _under(path, CLASS), f"the key `{CLASS}` is missing, and {why}.{near}")
        return None

    def _unknown(self, config: type, known: Mapping[str, Field[Any]], name: str, node: Node, path: str) -> None:
        owner = getattr(config, CLASS, "") or config.__name__
        near = suggestion(name, known) or f" There are {', '.join(known) or 'none'}."
        self._complain(node, path, f"{owner} has no key `{name}`.{near}")

    def _shown(self, value: Any, path: str) -> str:
        if is_secret(path):
            return HIDDEN
        words = {True: "true", False: "false", None: "null"}
        text = words[value] if value is None or isinstance(value, bool) else repr(value)
        return text if len(text) <= 80 else f"{text[:77]}…"

    def _complain(self, node: Node, path: str, text: str) -> Any:
        self.problems.append(ConfigProblem(node.place, path, text))
        return INVALID


def _under(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def _bare(option: Any) -> Any:
    return get_args(option)[0] if get_origin(option) is Annotated else option


def _is(option: Any, kind: type) -> bool:
    origin = get_origin(option)
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _could_be(config: type, node: Node) -> bool:
    known = {field.name: field for field in fields(config) if field.init} if is_dataclass(config) else {}
    required = {name for name, field in known.items() if _is_required(field)}
    return required <= set(node.section) <= set(known)


def _own_class_hint(name: Any, near: str) -> str:
    if near or not isinstance(name, str):
        return ""
    return " A class of your own is registered by importing it: `--import your_package.models`, or give its .py file."
