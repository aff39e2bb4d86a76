"""Parses a safe subset of YAML 1.2: plain data only, with the line of every value.

`1e-3` is a number and `no` is a string; duplicate keys, tags, anchors and aliases are errors, and size and depth are
limited. So a file cannot run code, construct objects, or exhaust memory.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from jax_trainer.config.problems import BROKEN, ConfigError, Location, Node, Problems, Scalar

MAX_BYTES = 100_000
MAX_VALUES = 5_000
MAX_DEPTH = 40
MAX_KEY = 200
MAX_DIGITS = 100

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAB_BEFORE = re.compile(r" *\t")


def scalar_of(text: str) -> Scalar:
    """The value of an unquoted scalar.

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


def key_problem(key: str, *, dotted: bool = False) -> str:
    """What is wrong with a key, which may be a path if `dotted`; "" if nothing is."""
    if dotted:
        return key_problem(key.replace(".", "_"))
    if key == "<<":
        return "Merge keys (`<<`) are not supported. Use `include: base.yaml` at the top."
    if not key or "." in key or "=" in key:
        return f"A key must be a name without dots, got {key[:MAX_KEY]!r}. Indent to write a section."
    return f"A key may have at most {MAX_KEY} characters." if len(key) > MAX_KEY else ""


def parse(text: str, source: str, problems: Problems, *, numbered: bool = True, dotted: bool = False) -> Node:
    """The document in `text` as nodes; `source` is the file name in locations. Top-level keys may be `dotted` paths.

    Unsupported values are added to `problems` and replaced by `BROKEN`; raises if `text` is not valid YAML.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        size = f"The text is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most."
        raise problems.fatal(Location(source), "", size)
    reader = _Reader(yaml.parse(text, Loader=yaml.SafeLoader), source, numbered, problems, dotted)
    try:
        return reader.document()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if numbered and mark is not None else 0
        raise problems.fatal(Location(source, line), "", _describe(error, text)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else 0
        text = f"Invalid YAML: write the character {error.character:#x} as an escape in double quotes."
        raise problems.fatal(Location(source, line), "", text) from None
    except (ValueError, OverflowError):  # PyYAML converts numbers without checking them
        text = "Invalid YAML: the number of an escape or of the version is too large."
        raise problems.fatal(reader.location, "", text) from None


def _describe(error: yaml.MarkedYAMLError, text: str) -> str:
    # the text itself is not quoted: it may be an unquoted secret
    problem, mark = error.problem or "", error.problem_mark
    line = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark is not None else ""
    if "'\\t'" in problem or _TAB_BEFORE.match(line):
        return "YAML does not allow tabs as indentation or separators. Use spaces."
    if " tag " in problem:
        return "Quote a string that starts with `!`."
    context = f" {error.context}" if error.context and " tag" not in error.context else ""
    near = " Quote a reference inside [] or {}." if "${" in line else ""
    if "could not find expected ':'" in problem:
        near = " Write `key: value`, with a space after the colon."
    return f"Invalid YAML:{context} {problem}.{near}"


class _Reader:
    """Turns parser events into nodes."""

    def __init__(
        self, events: Iterator[yaml.Event], source: str, numbered: bool, problems: Problems, dotted: bool
    ) -> None:
        self._events, self._source, self._numbered = events, source, numbered
        self._problems, self._dotted = problems, dotted
        self.location = Location(source, 1 if numbered else 0)  # of the current event
        self._path: list[str] = []  # keys and indices of the current value
        self._values = 0

    def document(self) -> Node:
        root: Node | None = None
        while not isinstance(event := self._next(), yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise self._fatal("A second document starts here (`---`). A configuration is one document.")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event)
        return root or Node(None, self.location)

    def _next(self) -> yaml.Event:
        event = next(self._events)
        self.location = Location(self._source, event.start_mark.line + 1 if self._numbered else 0)
        return event

    def _node(self, event: yaml.Event) -> Node:
        location, is_plain = self.location, self._is_plain(event)
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._fatal(f"More than {MAX_VALUES:,} values. Put large data into data files.")
        if isinstance(event, yaml.CollectionStartEvent) and len(self._path) >= MAX_DEPTH:
            raise self._fatal(f"Sections are nested more than {MAX_DEPTH} deep.")
        value: Any = BROKEN
        if isinstance(event, yaml.ScalarEvent):
            value = scalar_of(event.value) if event.style is None else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._list()
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._mapping()
        return Node(value if is_plain else BROKEN, location)

    def _list(self) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            self._path.append(str(len(items)))
            items.append(self._node(event))
            self._path.pop()
        return items

    def _mapping(self) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                raise self._fatal("A key must be a string, not a list or a section.")
            location, is_usable = self.location, self._is_plain(event)
            key = getattr(event, "value", "*")
            problem = key_problem(key, dotted=self._dotted and not self._path)
            if key in entries:
                problem = f"Duplicate key `{key}`; the first is at {entries[key].location}."
            self._path.append(key[:MAX_KEY])
            if problem:
                self._refuse(problem)
            node = self._node(self._next())
            self._path.pop()
            if is_usable and not problem:
                entries[key] = Node(node.value, location)  # the line of the key, also if its section starts on the next
        return entries

    def _is_plain(self, event: yaml.Event) -> bool:
        """Whether a node is only data; refuses it otherwise."""
        if isinstance(event, yaml.AliasEvent):
            self._refuse("Aliases (`*`) are not supported. Use a reference: `${path.to.value}`.")
            return False
        if getattr(event, "anchor", None) is not None:
            self._refuse("Anchors (`&`) are not supported. Use a reference: `${path.to.value}`.")
        has_tag = getattr(event, "tag", None) is not None
        if has_tag:
            self._refuse("Tags (`!`) are not supported: a configuration is plain data. Quote the string.")
        is_text = not _SURROGATE.search(getattr(event, "value", ""))
        if not is_text:
            self._refuse("This string contains an unpaired surrogate escape.")
        return is_text and not has_tag

    def _refuse(self, text: str) -> None:
        self._problems.add(self.location, ".".join(filter(None, self._path)), text)

    def _fatal(self, text: str) -> ConfigError:
        self._refuse(text)
        return self._problems.error()
