"""Our reading of YAML: plain data only, typed as YAML 1.2 does, with the line of every value, and nothing surprising.

`1e-3` is a number and `no` is text; a key that stands twice is an error; there are no tags, anchors or aliases, and a
text has bounds in size and depth. So nothing in a file can name code, build an object, or blow up.
"""

import re
from collections.abc import Iterator

import yaml

from jax_trainer.config.nodes import BROKEN, Node, Scalar
from jax_trainer.config.problems import ConfigError, Place, Problems

MAX_BYTES = 100_000
MAX_VALUES = 5_000
MAX_DEPTH = 40
MAX_KEY = 200
MAX_DIGITS = 100

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_TAB_BEFORE = re.compile(r" *\t")


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


def key_problem(key: str, *, dotted: bool = False) -> str:
    """What is wrong with the name of a key, which may be a path where it is `dotted`; "" if nothing is."""
    if dotted:
        return key_problem(key.replace(".", "_"))
    if key == "<<":
        return "Merge keys (`<<`) are not read here. Use `include: base.yaml` at the top."
    if not key or "." in key or "=" in key:
        return f"A key is a name without dots, got {key[:MAX_KEY]!r}. Sections are written by indenting."
    return f"A key has at most {MAX_KEY} characters." if len(key) > MAX_KEY else ""


def parse(text: str, source: str, problems: Problems, *, numbered: bool = True, dotted: bool = False) -> Node:
    """The one document in `text`, as nodes; `source` is what places call it. Outermost keys may be `dotted` paths.

    What is not allowed in it is added to `problems`, and `BROKEN` in its place; what is no YAML at all is raised.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        size = f"The text is larger than {MAX_BYTES:,} bytes. A configuration is a few pages at most."
        raise _given_up(problems, Place(source), size)
    builder = _Builder(source, numbered, problems, dotted)
    try:
        return builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if numbered and mark is not None else 0
        raise _given_up(problems, Place(source, line), _in_words(error, text)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else 0
        text = f"This is no YAML: the character {error.character:#x} may only stand in double quotes, as an escape."
        raise _given_up(problems, Place(source, line), text) from None
    except (ValueError, OverflowError):  # of PyYAML, which does not look at what it converts
        text = "This is no YAML: an escape or a version has too large a number."
        raise _given_up(problems, builder.place, text) from None


def _in_words(error: yaml.MarkedYAMLError, text: str) -> str:
    # nothing of the text is repeated, for it may be a secret that ought to stand in quotes
    problem, mark = error.problem or "", error.problem_mark
    line = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark is not None else ""
    if "'\\t'" in problem or _TAB_BEFORE.match(line):
        return "A tab cannot indent or separate in YAML. Use spaces."
    if " tag " in problem:
        return "A text that begins with `!` must stand in quotes."
    context = f" {error.context}" if error.context and " tag" not in error.context else ""
    near = " A reference inside of [] or {} must stand in quotes." if "${" in line else ""
    if "could not find expected ':'" in problem:
        near = " Write `key: value`, with a space after the colon."
    return f"This is no YAML:{context} {problem}.{near}"


def _given_up(problems: Problems, place: Place, text: str) -> ConfigError:
    problems.add(place, "", text)
    return problems.error()


class _Open:
    """A section or list whose end has not come yet."""

    def __init__(self, value: dict[str, Node] | list[Node], place: Place, is_plain: bool) -> None:
        self.value, self.place, self.is_plain = value, place, is_plain
        self.key: str | None = None
        self.key_place = place
        self.is_key_usable = True

    @property
    def expects_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None

    @property
    def name(self) -> str:
        """What its part that is being read is called in a path."""
        return str(len(self.value)) if isinstance(self.value, list) else self.key or ""


class _Builder:
    """Puts events together without recursion, so that depth is bounded by a number and not by the stack."""

    def __init__(self, source: str, numbered: bool, problems: Problems, dotted: bool) -> None:
        self._source, self._numbered, self._problems, self._dotted = source, numbered, problems, dotted
        self.place = Place(source, 1 if numbered else 0)  # how far it has come
        self._open: list[_Open] = []
        self._root: Node | None = None
        self._values = 0

    def build(self, events: Iterator[yaml.Event]) -> Node:
        for event in events:
            self._take(event)
        return self._root or Node(None, self.place)

    def _take(self, event: yaml.Event) -> None:
        place = self.place = Place(self._source, event.start_mark.line + 1 if self._numbered else 0)
        match event:
            case yaml.AliasEvent():
                self._refuse(place, "Aliases (`*`) are not read here. Use a reference: `${path.to.value}`.")
                self._word("*", Node(BROKEN, place))
            case yaml.DocumentStartEvent() if self._root is not None:
                raise self._given_up(place, "A second document begins here (`---`). A configuration is one document.")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                is_plain = self._is_plain(event, event.tag, place)
                self._begin(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], place, is_plain))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._open.pop()
                self._add(Node(done.value if done.is_plain else BROKEN, done.place))
            case yaml.ScalarEvent():
                value = scalar_of(event.value) if event.style is None else event.value
                self._word(event.value, Node(value if self._is_plain(event, event.tag, place) else BROKEN, place))

    def _is_plain(self, event: yaml.NodeEvent, tag: str | None, place: Place) -> bool:
        if event.anchor is not None:
            self._refuse(place, "Anchors (`&`) are not read here. Use a reference: `${path.to.value}`.")
        if tag is not None:
            self._refuse(place, "Tags (`!`) are not read here: a configuration is plain data. Quote what is text.")
        is_whole = not _HALF_CHARACTER.search(getattr(event, "value", ""))
        if not is_whole:
            self._refuse(place, "This text has an escape for half a character.")
        return tag is None and is_whole

    def _begin(self, new: _Open) -> None:
        if self._open and self._open[-1].expects_key:
            raise self._given_up(new.place, "A key must be text, not a list or a section.")
        if len(self._open) >= MAX_DEPTH:
            raise self._given_up(new.place, f"Sections are nested more than {MAX_DEPTH} deep.")
        self._open.append(new)

    def _word(self, text: str, node: Node) -> None:
        if self._open and self._open[-1].expects_key:
            self._key(self._open[-1], text, node)
        else:
            self._add(node)

    def _key(self, holder: _Open, key: str, node: Node) -> None:
        assert isinstance(holder.value, dict)
        holder.key, holder.key_place = key[:MAX_KEY], node.place
        problem = key_problem(key, dotted=self._dotted and len(self._open) == 1)
        if key in holder.value:
            first = holder.value[key].place
            problem = f"The key `{key}` stands here for the second time; the first is at {first}."
        if problem:
            self._refuse(node.place, problem)
        holder.is_key_usable = not problem and node.value is not BROKEN

    def _add(self, node: Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._given_up(node.place, f"There are more than {MAX_VALUES:,} values. Put large data into files.")
        if not self._open:
            self._root = node
            return
        holder = self._open[-1]
        if isinstance(holder.value, list):
            holder.value.append(node)
            return
        assert holder.key is not None
        if holder.is_key_usable:
            # people look for the line of the key, also when its section begins on the next one
            holder.value[holder.key] = Node(node.value, holder.key_place)
        holder.key = None

    def _refuse(self, place: Place, text: str) -> None:
        self._problems.add(place, ".".join(holder.name for holder in self._open if holder.name), text)

    def _given_up(self, place: Place, text: str) -> ConfigError:
        self._refuse(place, text)
        return self._problems.error()
