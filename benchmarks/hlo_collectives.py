"""Reads the collectives of compiled HLO: number, size, and phase of the step.

An asynchronous pair (start and done) counts once, and a collective in a loop once per iteration.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

KINDS = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}  # per number; other types have their bits in their name
# instructions that the GPU compiler ignores between an all-reduce and the slice that makes it a reduce-scatter; `add`,
# because it adds first what would be reduced twice
TRANSPARENT = "bitcast", "copy", "transpose", "reshape", "add"


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # the parentheses
    attributes: str


class Collective(NamedTuple):
    """One collective as a device sees it."""

    kind: str
    payload: int  # bytes that a group of devices reduces, gathers or exchanges
    group: int  # number of devices
    sliced: tuple[
        tuple[int, int], ...
    ] = ()  # arrays of an all-reduce of which a device then keeps one slice: bytes, slices
    times: int = 1  # executions per step
    is_certain: bool = True  # False in a loop of unknown length, where `times` is that of one iteration
    source: str = ""  # the operation of the program that it comes from

    @property
    def sent(self) -> float:
        """Bytes that a device sends per step, with ring algorithms."""
        return self.times * ring_bytes(self.kind, self.payload, self.group)

    @property
    def sent_if_scattered(self) -> float:
        """`sent`, if every all-reduce whose result is only sliced were a reduce-scatter.

        Devices that keep the same slice reduce it among themselves afterwards.
        """
        return self.sent - self.times * sum(_saved(size, ways, self.group) for size, ways in self.sliced)

    @property
    def phase(self) -> str:
        """The phase that it belongs to: forward pass, backward pass, or update."""
        if "transpose(" in self.source:
            return "backward"
        return "forward" if "jvp(" in self.source else "update"


Module = dict[str, list[Instruction]]


def collectives_of(hlo: str) -> list[Collective]:
    """All collectives of a compiled module, in the order in which they are written."""
    module, entry = _parse(hlo)
    devices = math.prod(map(int, re.findall(r"(?:replica_count|num_partitions)=(\d+)", hlo.partition("\n")[0])))
    return [_read(module, *found, devices) for found in _found(module, entry, 1, True)]


def array_bytes(shape: str) -> list[int]:
    """The bytes of every array in an HLO shape.

    >>> array_bytes("(f32[8,2]{1,0}, (pred[], bf16[3]))")
    [64, 1, 6]
    """
    arrays = re.findall(r"(\w+)\[([\d,<=]*)\]", re.sub(r"/\*.*?\*/", "", shape))
    return [_number_bytes(kind) * math.prod(int(n.strip("<=")) for n in dims.split(",") if n) for kind, dims in arrays]


def ring_bytes(kind: str, payload: float, group: int) -> float:
    """The bytes that a device of the group sends in a ring.

    >>> [ring_bytes(kind, 100, 4) for kind in ("all-reduce", "all-gather", "collective-permute")]
    [150.0, 75.0, 100]
    """
    if kind == "collective-permute":
        return payload
    rounds = 2 if kind == "all-reduce" else 1  # which is a reduce-scatter and an all-gather
    return rounds * payload * (group - 1) / group


def group_size(attributes: str, devices: int) -> int:
    """The group size, in any of HLO's notations for replica groups.

    >>> [group_size(f"replica_groups={text}, x=1", 8) for text in ("{{0,1},{2,3}}", "[2,4]<=[8]", "{}")]
    [2, 4, 8]
    >>> group_size("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x=1", 8)
    4
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[[\d,]*?(\d+)\]<=", attributes):
        return int(tiled[1])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        used = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])  # a sub-axis states its size
        return math.prod(int(part) if part else sizes[name] for name, part in used)
    return devices


def _saved(size: int, ways: int, group: int) -> float:
    if group % ways:  # another group slices it
        return 0.0
    scattered = ring_bytes("reduce-scatter", size, ways) + ring_bytes("all-reduce", size / ways, group // ways)
    return ring_bytes("all-reduce", size, group) - scattered


def _number_bytes(kind: str) -> int:
    if kind in BYTES:
        return BYTES[kind]
    bits = re.match(r"[a-z]+(\d+)", kind)
    return max(1, int(bits[1]) // 8) if bits else 0  # tokens take nothing


def _parse(hlo: str) -> tuple[Module, str]:
    """The instructions of every computation, and the name of the entry computation."""
    module: Module = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = header[2]
            module[name] = []
            entry = name if header[1] else entry
        elif line_match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
            module[name].append(_instruction(line_match[1], line_match[2]))
    return module, entry


def _instruction(name: str, text: str) -> Instruction:
    shape, text = _split_parentheses(text) if text.startswith("(") else text.split(" ", 1)
    opcode, text = text.strip().split("(", 1)
    inside, attributes = _split_parentheses(f"({text}")
    return Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", inside)), inside, attributes)


def _split_parentheses(text: str) -> tuple[str, str]:
    """Splits a text that starts with a parenthesis after the closing one."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _found(
    module: Module, computation: str, times: int, is_certain: bool
) -> Iterator[tuple[str, Instruction, int, bool]]:
    """The collectives that a computation reaches; both branches of a conditional count."""
    for one in module[computation]:
        if one.opcode.removesuffix("-start") in KINDS:
            yield computation, one, times, is_certain
        elif one.opcode == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.attributes)
            more = times * int(turns[1]) if turns else times
            yield from _found(module, _named("body", one), more, is_certain and turns is not None)
        elif one.opcode in ("fusion", "call", "async-start"):
            yield from _found(module, _named("calls|to_apply", one), times, is_certain)
        elif one.opcode == "conditional":
            listed = re.search(r"branch_computations=\{(.*?)\}", one.attributes)
            pair = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", one.attributes)
            for branch in re.findall(r"[\w.\-]+", listed[1]) if listed else pair:
                yield from _found(module, branch, times, is_certain)


def _named(role: str, one: Instruction) -> str:
    called = re.search(rf"(?:{role})=%?([\w.\-]+)", one.attributes)
    assert called is not None, f"{one.name} has no {role}"
    return called[1]


def _read(module: Module, computation: str, one: Instruction, times: int, is_certain: bool, devices: int) -> Collective:
    kind, group = one.opcode.removesuffix("-start"), group_size(one.attributes, devices)
    sizes = array_bytes(_result(one))
    slices = [_slices_of(module, computation, one, part) for part in range(len(sizes))] if kind == "all-reduce" else []
    sliced = tuple((size, ways) for size, ways in zip(sizes, slices, strict=False) if ways > 1)
    payload = sum(sizes) * (group if kind == "reduce-scatter" else 1)
    return Collective(kind, payload, group, sliced, times, is_certain, _source(module[computation], one))


def _source(instructions: list[Instruction], one: Instruction) -> str:
    """The operation that it comes from; for one that the compiler inserted, that of its operand."""
    if named := re.search(r'op_name="([^"]*)"', one.attributes):
        return named[1]
    operand = next((other for other in instructions if other.name in one.operands[:1]), None)
    return _source(instructions, operand) if operand else ""


def _result(one: Instruction) -> str:
    """The shape of the result; a start also returns its operands, before the result, except all-reduces on the CPU."""
    returns_operands = one.opcode in ("all-gather-start", "collective-permute-start") or one.shape.startswith("((")
    if not (one.opcode.endswith("-start") and returns_operands):
        return one.shape
    parts, text = [], re.sub(r"/\*.*?\*/", "", one.shape)[1:-1]
    while text := text.lstrip(", "):
        part, text = _split_parentheses(text) if text.startswith("(") else _until_comma(text)
        parts.append(part)
    return parts[1]


def _until_comma(text: str) -> tuple[str, str]:
    found = re.match(r"\w+\[[^\]]*\](?:\{[^}]*\})?", text)
    assert found is not None, f"not a shape: {text}"
    return found[0], text[found.end() :]


def _slices_of(module: Module, computation: str, reduced: Instruction, part: int) -> int:
    """Into how many slices a part of an all-reduce is cut, of which a device keeps one; 1 if it keeps all."""
    if reduced.opcode.endswith("-start"):
        reduced = next(user for user in module[computation] if reduced.name in user.operands)  # its done
    if not reduced.shape.startswith("("):
        return _cut(module, computation, reduced.name, lambda: 1)
    users = [user for user in module[computation] if reduced.name in user.operands]
    mine = [user for user in users if re.search(rf"index={part}\b", user.attributes)]
    return min((_cut(module, computation, user.name, lambda: 1) for user in mine), default=1)


def _cut(module: Module, computation: str, name: str, outside: Callable[[], int]) -> int:
    """Into how many slices all that uses `name` cuts it; `outside` tells of what uses the computation's result."""
    users = [user for user in module[computation] if name in user.operands]
    return min((_cut_by(module, computation, name, user, outside) for user in users), default=0) or outside()


def _cut_by(module: Module, computation: str, name: str, user: Instruction, outside: Callable[[], int]) -> int:
    if user.opcode == "dynamic-slice" and user.operands[0] == name:
        full = next(one for one in module[computation] if one.name == name)
        return array_bytes(full.shape)[0] // array_bytes(user.shape)[0]
    if user.opcode in TRANSPARENT:
        return _cut(module, computation, user.name, outside)
    if user.opcode == "fusion":
        inner, position = _named("calls", user), f"({user.operands.index(name)})"
        parameter = next(one for one in module[inner] if one.opcode == "parameter" and one.inside == position)
        return _cut(module, inner, parameter.name, lambda: _cut(module, computation, user.name, outside))
    return 1
