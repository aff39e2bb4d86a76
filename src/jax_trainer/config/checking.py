"""Builds configurations from parsed values: checks every value and collects all problems."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args, get_origin

from jax_trainer.config.problems import BROKEN, Node, Problems, is_number, shown
from jax_trainer.config.redaction import HIDDEN, is_secret
from jax_trainer.config.registration import full_name, missing_projects
from jax_trainer.config.settings import (
    Candidate,
    SettingsError,
    as_float,
    candidates,
    could_be,
    expected,
    fits,
    hints_of,
    init_fields,
    is_generic,
    is_required,
    kinds,
    listed,
    options,
    value_suggestion,
    words,
)
from jax_trainer.diagnostics.suggestions import beside, elsewhere

CLASS = "class_name"
INVALID = object()  # a value whose problems are collected already


class Checker:
    """Builds configurations from nodes.

    Args:
        problems: collects what is wrong.
        secrets: texts that messages must not contain.
    """

    def __init__(self, problems: Problems, secrets: Collection[str] = ()) -> None:
        self._problems, self._secrets = problems, secrets

    def make(self, hint: Any, node: Node, path: str, likely: str = "") -> Any:
        """The value of `node` for the annotation `hint`; `likely` is the class if there is no `class_name`."""
        if node.value is BROKEN:
            return INVALID
        allowed = candidates(hint)
        if allowed and (node.is_section or (likely and node.value is None)):
            chosen = self._choose(allowed, node, path, likely)
            return INVALID if chosen is None else self._configuration(chosen.name, chosen.config, node, path)
        for option, kind in zip(options(hint), kinds(hint), strict=True):
            if isinstance(node.value, list) and is_generic(kind, Sequence):
                made = self._list(kind, node.value, node, path)
            elif node.is_section and is_generic(kind, Mapping):
                made = self._mapping(kind, node, path)
            else:
                continue
            if made is not INVALID and option is not kind and not fits(option, made):  # a bound of the whole list
                found = self._shown(node.data(), path)
                return self._complain(node, path, f"expected {expected(hint)}, found {found}.")
            return made
        return self._plain(hint, node, path)

    def _plain(self, hint: Any, node: Node, path: str) -> Any:
        value = node.data()
        if _has_hidden(value):
            return self._complain(node, path, "this secret was redacted when the configuration was stored. Set it.")
        if not fits(hint, value):
            near = "" if self._problems.is_full else value_suggestion(hint, value, path.rpartition(".")[2])
            return self._complain(node, path, f"expected {expected(hint)}, found {self._shown(value, path)}.{near}")
        return as_float(hint, value)

    def _list(self, kind: Any, items: Sequence[Node], node: Node, path: str) -> Any:
        hints = get_args(kind)
        if get_origin(kind) is not tuple or hints[1:] == (...,):
            hints = (hints[0],) * len(items)
        elif len(hints) != len(items):
            return self._complain(node, path, f"expected {expected(kind)}, found a list of {len(items)}.")
        pairs = enumerate(zip(hints, items, strict=True))
        made = [self.make(hint, item, _under(path, str(number))) for number, (hint, item) in pairs]
        if any(value is INVALID for value in made):
            return INVALID
        return tuple(made) if get_origin(kind) is tuple else made

    def _mapping(self, kind: Any, node: Node, path: str) -> Any:
        key, item = get_args(kind)
        made: dict[Any, Any] = {}
        for text, part in node.section.items():
            # all keys of a file are text
            name = int(text) if int in kinds(key) and is_number(text) else text
            made[name] = self.make(item, part, _under(path, text), text)
            if not fits(key, name):
                near = self._problems.suggestion(text, words(key))
                made[name] = self._complain(part, _under(path, text), f"expected a key that is {expected(key)}.{near}")
        return INVALID if any(value is INVALID for value in made.values()) else made

    def _configuration(self, owner: str, config: type, node: Node, path: str) -> Any:
        before = len(self._problems)
        known, hints = init_fields(config), hints_of(config)
        made: dict[str, Any] = {}
        for name, part in node.section.items():
            if name in known:
                made[name] = self.make(hints[name], part, _under(path, name))
            elif name != CLASS:
                keys = [*known, CLASS] if getattr(config, CLASS, "") else known
                near = self._problems.suggestion(name, keys) or _inside(name, node) or elsewhere(name)
                near = near + beside(name, part.value) or f" Its keys: {listed(known) or 'none'}."
                self._complain(part, _under(path, name), f"{owner} has no key `{name}`.{near}")
        for name, field in known.items():
            if is_required(field) and name not in made:
                text = f"the key `{name}` is missing: expected {expected(hints[name])}."
                self._complain(node, _under(path, name), text)
        is_fine = len(self._problems) == before and all(value is not INVALID for value in made.values())
        return self._construct(owner, config, made, node, path) if is_fine else INVALID

    def _construct(self, owner: str, config: type, made: dict[str, Any], node: Node, path: str) -> Any:
        try:
            value = config(**made)
            if getattr(value, CLASS, ""):
                value.class_name = owner  # several classes may share this configuration class
            return value
        except SettingsError as error:
            for key, text in error.problems:
                full = _under(path, key)
                self._problems.add(node.location_of(key), full, settings_problem(full, text))
        except (ValueError, TypeError, AssertionError) as error:  # a user's dataclass with custom checks
            self._complain(node, path, f"{owner} rejects these values: {str(error) or repr(error)}")
        return INVALID

    def _choose(self, allowed: Sequence[Candidate], node: Node, path: str, likely: str) -> Candidate | None:
        named = node.section.get(CLASS)
        if named is not None:
            return self._choose_named(allowed, named, node, path)
        allowed = [one for one in allowed if one.name != one.path]  # a class whose name was taken needs its full path
        likely_ones = [one for one in allowed if one.name == likely] or allowed
        fitting = [one for one in likely_ones if could_be(one.config, node.section.keys() - {CLASS})]
        if len(likely_ones) == 1 or len(fitting) == 1:
            return [*fitting, *likely_ones][0]
        why = "several classes have these keys:" if fitting else "no class has exactly these keys. Classes:"
        names = listed(one.name for one in fitting or likely_ones)
        other = next((name for name in node.section if self._problems.suggestion(name, [CLASS])), "")
        near = f" Write `{CLASS}` instead of `{other}`." if other else ""
        near = near or self._problems.suggestion(likely, [one.name for one in allowed])
        self._complain(node, _under(path, CLASS), f"the key `{CLASS}` is missing, and {why} {names}.{near}")
        return None

    def _choose_named(self, allowed: Sequence[Candidate], named: Node, node: Node, path: str) -> Candidate | None:
        namesakes = [one for one in allowed if named.value and named.value in (one.name, one.path)]
        fitting = [one for one in namesakes if could_be(one.config, node.section.keys() - {CLASS})]
        if len(namesakes) == 1 or len(fitting) == 1:
            return [*fitting, *namesakes][0]
        if namesakes:
            twins = listed(full_name(one.config) for one in namesakes)
            self._complain(named, _under(path, CLASS), f"several classes have this name: {twins}. Rename one.")
        elif named.value is not BROKEN:
            names = [one.name for one in allowed]
            # a dotted path belongs to a class that is not imported: no similar name can help
            name = named.value if isinstance(named.value, str) and "." not in named.value else ""
            near = self._problems.suggestion(name, names) if name else ""
            found = f"found {self._shown(named.data(), CLASS)}.{near or _OWN_CLASS}{missing_projects()}"
            self._complain(named, _under(path, CLASS), f"expected one of {listed(names)}, {found}")
        return None

    def _shown(self, value: Any, path: str) -> str:
        return "…" if self._problems.is_full else shown(value, path, self._secrets)

    def _complain(self, node: Node, path: str, text: str) -> Any:
        self._problems.add(node.location, path, text)
        return INVALID


_OWN_CLASS = " To register your own class, import it: `--import your_package.models`, or add its .py file."


def settings_problem(key: str, text: str) -> str:
    """The message of a `SettingsError` about a key, without the value if the key names a secret."""
    return "this value is invalid. It is not shown, because the key names a secret." if is_secret(key) else text


def _under(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def _inside(name: str, node: Node) -> str:
    """A hint at a sibling section that has the unknown key."""
    sections = (section for section, part in node.section.items() if part.is_section and name in part.section)
    section = next(sections, "")
    return f" Did you mean `{section}.{name}`?" if section else ""


def _has_hidden(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_hidden, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and HIDDEN in value
