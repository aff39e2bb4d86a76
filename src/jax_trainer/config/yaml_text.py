"""Parses a safe subset of YAML 1.2: plain data only, with the line of every value.

`1e-3` is a number and `no` is a string; duplicate keys, tags, anchors and aliases are errors, and size and depth are
limited. So a file cannot run code, construct objects, or exhaust memory.
"""

import re
from collections.abc import Iterator

import yaml

from jax_trainer.config.nodes import BROKEN, Node, Scalar
from jax_trainer.config.problems import ConfigError, Location, Problems

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
        raise _fatal(problems, Location(source), size)
    builder = _Builder(source, numbered, problems, dotted)
    try:
        return builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if numbered and mark is not None else 0
        raise _fatal(problems, Location(source, line), _describe(error, text)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else 0
        text = f"Invalid YAML: write the character {error.character:#x} as an escape in double quotes."
        raise _fatal(problems, Location(source, line), text) from None
    except (ValueError, OverflowError):  # PyYAML converts numbers without checking them
        text = "Invalid YAML: the number of an escape or of the version is too large."
        raise _fatal(problems, builder.location, text) from None


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


def _fatal(problems: Problems, location: Location, text: str) -> ConfigError:
    problems.add(location, "", text)
    return problems.error()


class _Open:
    """A mapping or sequence that is being parsed."""

    def __init__(self, value: dict[str, Node] | list[Node], location: Location, is_plain: bool) -> None:
        self.value, self.location, self.is_plain = value, location, is_plain
        self.key: str | None = None
        self.key_location = location
        self.is_key_usable = True

    @property
    def expects_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None

    @property
    def name(self) -> str:
        """The key or index of the current entry, for paths."""
        return str(len(self.value)) if isinstance(self.value, list) else self.key or ""


class _Builder:
    """Builds nodes from parser events without recursion, so that a number limits the depth and not the stack."""

    def __init__(self, source: str, numbered: bool, problems: Problems, dotted: bool) -> None:
        self._source, self._numbered, self._problems, self._dotted = source, numbered, problems, dotted
        self.location = Location(source, 1 if numbered else 0)  # of the current event
        self._open: list[_Open] = []
        self._root: Node | None = None
        self._values = 0

    def build(self, events: Iterator[yaml.Event]) -> Node:
        for event in events:
            self._handle(event)
        return self._root or Node(None, self.location)

    def _handle(self, event: yaml.Event) -> None:
        location = self.location = Location(self._source, event.start_mark.line + 1 if self._numbered else 0)
        match event:
            case yaml.AliasEvent():
                self._refuse(location, "Aliases (`*`) are not supported. Use a reference: `${path.to.value}`.")
                self._scalar("*", Node(BROKEN, location))
            case yaml.DocumentStartEvent() if self._root is not None:
                raise self._fatal(location, "A second document starts here (`---`). A configuration is one document.")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                is_plain = self._is_plain(event, event.tag, location)
                self._begin(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], location, is_plain))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._open.pop()
                self._add(Node(done.value if done.is_plain else BROKEN, done.location))
            case yaml.ScalarEvent():
                value = scalar_of(event.value) if event.style is None else event.value
                self._scalar(
                    event.value, Node(value if self._is_plain(event, event.tag, location) else BROKEN, location)
                )

    def _is_plain(self, event: yaml.NodeEvent, tag: str | None, location: Location) -> bool:
        if event.anchor is not None:
            self._refuse(location, "Anchors (`&`) are not supported. Use a reference: `${path.to.value}`.")
        if tag is not None:
            self._refuse(location, "Tags (`!`) are not supported: a configuration is plain data. Quote the string.")
        is_valid = not _SURROGATE.search(getattr(event, "value", ""))
        if not is_valid:
            self._refuse(location, "This string contains an unpaired surrogate escape.")
        return tag is None and is_valid

    def _begin(self, new: _Open) -> None:
        if self._open and self._open[-1].expects_key:
            raise self._fatal(new.location, "A key must be a string, not a list or a section.")
        if len(self._open) >= MAX_DEPTH:
            raise self._fatal(new.location, f"Sections are nested more than {MAX_DEPTH} deep.")
        self._open.append(new)

    def _scalar(self, text: str, node: Node) -> None:
        if self._open and self._open[-1].expects_key:
            self._key(self._open[-1], text, node)
        else:
            self._add(node)

    def _key(self, holder: _Open, key: str, node: Node) -> None:
        assert isinstance(holder.value, dict)
        holder.key, holder.key_location = key[:MAX_KEY], node.location
        problem = key_problem(key, dotted=self._dotted and len(self._open) == 1)
        if key in holder.value:
            first = holder.value[key].location
            problem = f"Duplicate key `{key}`; the first is at {first}."
        if problem:
            self._refuse(node.location, problem)
        holder.is_key_usable = not problem and node.value is not BROKEN

    def _add(self, node: Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._fatal(node.location, f"More than {MAX_VALUES:,} values. Put large data into data files.")
        if not self._open:
            self._root = node
            return
        holder = self._open[-1]
        if isinstance(holder.value, list):
            holder.value.append(node)
            return
        assert holder.key is not None
        if holder.is_key_usable:
            # the line of the key, also if its section starts on the next line
            holder.value[holder.key] = Node(node.value, holder.key_location)
        holder.key = None

    def _refuse(self, location: Location, text: str) -> None:
        self._problems.add(location, ".".join(holder.name for holder in self._open if holder.name), text)

    def _fatal(self, location: Location, text: str) -> ConfigError:
        self._refuse(location, text)
        return self._problems.error()
