"""Our reading of YAML: plain data only, typed as YAML 1.2 does, with the line of every value, and nothing surprising.

`1e-3` is a number and `no` is text; a key that stands twice is an error; there are no tags, anchors or aliases, and a
text has bounds in size and depth. So nothing in a file can name code, build an object, or blow up.
"""

import re
from collections.abc import Iterator

import yaml

from jax_trainer.config.nodes import Node, Scalar
from jax_trainer.config.problems import ConfigError, ConfigProblem, Place

MAX_BYTES = 100_000
MAX_DEPTH = 40
MAX_DIGITS = 100

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def scalar_of(text: str) -> Scalar:
    """What an unquoted word means.

    >>> scalar_of("1e-3"), scalar_of("0x10"), scalar_of("no"), scalar_of("2026-11-15"), scalar_of("~")
    (0.001, 16, 'no', '2026-11-15', None)
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) <= MAX_DIGITS and _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if len(text) <= MAX_DIGITS and _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def parse(text: str, source: str, *, numbered: bool = True) -> Node:
    """The one document in `text`, as nodes; `source` is what places call it."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise _error(source, 0, f"The text is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most.")
    try:
        return _Builder(source, numbered).build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if numbered and mark is not None else 0
        raise _error(source, line, _in_words(error, text)) from None
    except yaml.YAMLError as error:  # a character that no YAML may hold
        raise _error(source, 0, f"This is no YAML: {' '.join(str(error).split())}.") from None


def _in_words(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    lines = text.splitlines()
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line]:
        return "A tab cannot indent or separate in YAML. Use spaces."
    context = f" {error.context}" if error.context else ""
    return f"This is no YAML:{context} {error.problem}."


def _error(source: str, line: int, text: str) -> ConfigError:
    return ConfigError([ConfigProblem(Place(source, line), "", text)])


class _Open:
    """A section or list whose end has not come yet."""

    def __init__(self, value: dict[str, Node] | list[Node], place: Place) -> None:
        self.value, self.place = value, place
        self.key: str | None = None
        self.key_place = place


class _Builder:
    """Puts events together without recursion, so that depth is bounded by a number and not by the stack."""

    def __init__(self, source: str, numbered: bool) -> None:
        self._source, self._numbered = source, numbered
        self._open: list[_Open] = []
        self._root: Node | None = None
        self._problems: list[ConfigProblem] = []

    def build(self, events: Iterator[yaml.Event]) -> Node:
        for event in events:
            self._take(event)
        if self._problems:
            raise ConfigError(self._problems)
        return self._root or Node(None, Place(self._source, 1 if self._numbered else 0))

    def _take(self, event: yaml.Event) -> None:
        place = Place(self._source, event.start_mark.line + 1 if self._numbered else 0)
        match event:
            case yaml.AliasEvent():
                self._refuse(place, "Aliases (`*name`) are not read here. Use a reference: `${path.to.value}`.")
                self._add(Node(None, place))
            case yaml.DocumentStartEvent() if self._root is not None:
                raise self._give_up(place, "A second document begins here (`---`). A configuration is one document.")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._check_plain(event, place)
                self._begin({} if isinstance(event, yaml.MappingStartEvent) else [], place)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._open.pop()
                self._add(Node(done.value, done.place))
            case yaml.ScalarEvent():
                self._check_plain(event, place)
                self._scalar(event, place)

    def _check_plain(self, event: yaml.NodeEvent, place: Place) -> None:
        tag = getattr(event, "tag", None)
        if event.anchor is not None:
            self._refuse(place, f"Anchors (`&{event.anchor}`) are not read here. Use `${{path.to.value}}`.")
        if tag is not None:
            self._refuse(place, f"Tags (`{tag}`) are not read here: a configuration is plain data.")

    def _begin(self, value: dict[str, Node] | list[Node], place: Place) -> None:
        holder = self._open[-1] if self._open else None
        if holder is not None and isinstance(holder.value, dict) and holder.key is None:
            raise self._give_up(place, "A key must be text, not a list or a section.")
        if len(self._open) >= MAX_DEPTH:
            raise self._give_up(place, f"Sections are nested more than {MAX_DEPTH} deep.")
        self._open.append(_Open(value, place))

    def _scalar(self, event: yaml.ScalarEvent, place: Place) -> None:
        holder = self._open[-1] if self._open else None
        if holder is not None and isinstance(holder.value, dict) and holder.key is None:
            self._key(holder, event.value, place)
            return
        is_plain = event.style is None
        self._add(Node(scalar_of(event.value) if is_plain else event.value, place))

    def _key(self, holder: _Open, key: str, place: Place) -> None:
        assert isinstance(holder.value, dict)
        if key == "<<":
            self._refuse(place, "Merge keys (`<<`) are not read here. Use `include: base.yaml` at the top.")
        elif not key or "." in key or "=" in key:
            self._refuse(place, f"A key is a name without dots, got {key!r}. Sections are written by indenting.")
        elif key in holder.value:
            first = holder.value[key].place
            self._refuse(place, f"The key `{key}` stands here for the second time; the first is at {first}.")
        holder.key, holder.key_place = key, place

    def _add(self, node: Node) -> None:
        if not self._open:
            self._root = node
            return
        holder = self._open[-1]
        if isinstance(holder.value, list):
            holder.value.append(node)
        else:
            assert holder.key is not None
            # people look for the line of the key, also when its section begins on the next one
            holder.value[holder.key] = Node(node.value, holder.key_place)
            holder.key = None

    def _refuse(self, place: Place, text: str) -> None:
        path = ".".join(holder.key for holder in self._open if holder.key)
        self._problems.append(ConfigProblem(place, path, text))

    def _give_up(self, place: Place, text: str) -> ConfigError:
        self._refuse(place, text)
        return ConfigError(self._problems)
