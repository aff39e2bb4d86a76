"""`match`: every tensor of the files and every array of a model has its place, or an error lists all that have none."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jax_trainer.checkpoint.files import label
from jax_trainer.pretrained.files import PretrainedError
from jax_trainer.pretrained.mapping import MappingConfig, NumberingConfig, TensorRowConfig
from jax_trainer.pretrained.patterns import Pattern, Values
from jax_trainer.pretrained.rearranging import RearrangeError
from jax_trainer.pretrained.transfer import Specs, Transfer
from jax_trainer.suggestions import nearest

LOG = logging.getLogger("jax_trainer")
_MOST_LINES = 20  # of each kind
_MOST_NAMED = 5


@dataclass
class Match:
    """What a mapping finds.

    Attributes:
        transfers: tensors and arrays with the same values.
        tied: tensors that must equal another one, which is loaded.
        ignored: tensors that are not loaded, and why.
        problems: what has no place, or another shape; by kind, with a line for each.
        unused: names of tensors without a place.
        missing: names of arrays without a tensor.
    """

    transfers: list[Transfer] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Matcher:
    """Applies a mapping to names.

    Args:
        name: of the mapping, in messages.
        mapping: the rows.
        config: our configuration, whose keys the mapping may name as sizes; None without any.
    """

    def __init__(self, name: str, mapping: MappingConfig, config: Any = None) -> None:
        self.name, self.mapping = name, mapping
        self.sizes = {key: self._number(value, f"sizes.{key}", config) for key, value in mapping.sizes.items()}
        self.numbering = {
            key: _Numbering(one, self._counts(one, key, config)) for key, one in mapping.numbering.items()
        }

    def match(self, tensors: Specs, arrays: Specs) -> Match:
        """The places of tensors in a model, of which `arrays` are all arrays that have a value in the files."""
        found, sources = Match(), self._sources(tensors)
        for (number, key), names in sources.items():
            self._place(found, self.mapping.tensors[number], dict(key), names, tensors, arrays)
        self._add_tied_arrays(found, tensors, arrays)
        has_source = {name for one in found.transfers for name in one.arrays}
        found.missing = [name for name in arrays if name not in has_source]
        known = {name for names in sources.values() for name in names.values()}
        found.unused += [name for name in tensors if name not in known and name not in found.ignored]
        self._describe(found, tensors, arrays)
        return found

    def reverse(self, arrays: Specs) -> list[Transfer]:
        """The tensors to write for these arrays; an error lists arrays without any."""
        groups: dict[tuple[int, Any], dict[int, str]] = {}
        missing = []
        for name in arrays:
            found = next(self._rows_of_array(name), None)
            if found is None:
                missing.append(name)
            else:
                number, part, values = found
                groups.setdefault((number, tuple(sorted(values.items()))), {})[part] = name
        if missing:
            lines = [f"{name} {arrays[name]}" for name in missing]
            raise _error(f"The mapping {self.name!r} has no row for some arrays of the model", {"Without a row": lines})
        made = []
        for (number, key), names in groups.items():
            row = self.mapping.tensors[number]
            filled = tuple(Pattern.of(text).fill(dict(key)) for text in row.tensors)
            made.append(Transfer(row, filled, tuple(names[part] for part in sorted(names)), self.sizes))
        return made

    def beside(self, transfer: Transfer) -> str | None:
        """The name of the counter that belongs to the tensor of a transfer; None without any."""
        if transfer.row.beside is None:
            return None
        values = Pattern.of(transfer.row.tensors[0]).match(transfer.tensors[0])
        return Pattern.of(transfer.row.beside).fill(values or {})

    def _sources(self, tensors: Iterable[str]) -> dict[tuple[int, Any], dict[int, str]]:
        """The tensors of each row and its variables, by their number in the row."""
        groups: dict[tuple[int, Any], dict[int, str]] = {}
        for name in tensors:
            for number, row in enumerate(self.mapping.tensors):
                texts = (*row.tensors, *((row.beside,) if row.beside else ()))
                matches = ((part, Pattern.of(text).match(name)) for part, text in enumerate(texts))
                part, values = next(((part, found) for part, found in matches if found is not None), (0, None))
                if values is None:
                    continue
                group = groups.setdefault((number, tuple(sorted(values.items()))), {})
                if part not in group:
                    group[part] = name
                elif row.ignore is not None:  # `(weight|bias)`, and both are there
                    group[len(group)] = name
                break  # a second tensor for the same array has no place
        return groups

    def _place(
        self,
        found: Match,
        row: TensorRowConfig,
        values: dict[str, Any],
        names: dict[int, str],
        tensors: Specs,
        arrays: Specs,
    ) -> None:
        """Adds what becomes of the tensors of one row with these values of its variables."""
        if row.beside is not None and (counter := names.pop(len(row.tensors), None)) is not None:
            found.ignored[counter] = "a counter of the training"
        own = tuple(names[part] for part in sorted(names))
        if row.ignore is not None:
            found.ignored.update(dict.fromkeys(own, row.ignore))
            return
        if len(own) < len(row.tensors):
            absent = [Pattern.of(text).fill(values) for part, text in enumerate(row.tensors) if part not in names]
            text = f"{', '.join(own)}: joined with {', '.join(absent)}, which the files lack"
            found.problems.setdefault("Incomplete", []).append(text)
            return
        wanted = tuple(Pattern.of(text).fill(self._numbered(values)) for text in row.arrays)
        there = [name for name in wanted if name in arrays]
        if wanted and len(there) == len(wanted):
            transfer = Transfer(row, own, wanted, self.sizes)
            found.transfers.append(transfer)
            self._check_shape(found, transfer, tensors, arrays)
        elif row.tie is not None and (other := self._tied_to(row, values, tensors)) is not None:
            found.tied.update(dict.fromkeys(own, other))
        elif row.optional is not None and not there:
            found.ignored.update(dict.fromkeys(own, row.optional))
        else:
            found.unused += own

    def _check_shape(self, found: Match, transfer: Transfer, tensors: Specs, arrays: Specs) -> None:
        shapes = [list(arrays[name].shape) for name in transfer.arrays]
        wanted, axis = shapes[0], transfer.row.axis or 0
        if len(shapes) > 1:
            wanted[axis] = sum(shape[axis] for shape in shapes)
        sources = ", ".join(f"{name} {tensors[name]}" for name in transfer.tensors)
        try:
            got = transfer.shape(tensors)
        except (RearrangeError, IndexError) as error:
            found.problems.setdefault("Other shapes", []).append(f"{transfer.arrays[0]} from {sources}: {error}")
            return
        if got != tuple(wanted):
            how = "" if transfer.row.rearrange is None else f" ({transfer.row.rearrange})"
            line = f"{', '.join(transfer.arrays)} is {wanted} in the model, and {list(got)} from {sources}{how}"
            found.problems.setdefault("Other shapes", []).append(line)

    def _tied_to(self, row: TensorRowConfig, values: Values, tensors: Specs) -> str | None:
        pattern = Pattern.of(row.tie or "")
        return next((name for name in tensors if (other := pattern.match(name)) is not None and other == values), None)

    def _add_tied_arrays(self, found: Match, tensors: Specs, arrays: Specs) -> None:
        """Arrays of the model whose tensor is not in the files, because it equals another one."""
        has_source = {name for one in found.transfers for name in one.arrays}
        for name in (name for name in arrays if name not in has_source):
            for number, _, values in self._rows_of_array(name):
                row = self.mapping.tensors[number]
                if row.tie is not None and (other := self._tied_to(row, values, tensors)) is not None:
                    transfer = Transfer(row, (other,), (name,), self.sizes)
                    found.transfers.append(transfer)
                    self._check_shape(found, transfer, tensors, arrays)
                    break

    def _rows_of_array(self, name: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """The rows that match the path of an array: number, part, and values of the variables of the tensors."""
        for number, row in enumerate(self.mapping.tensors):
            for part, text in enumerate(row.arrays):
                values = Pattern.of(text).match(name)
                split = None if values is None else self._unnumbered(values)
                if split is not None:
                    yield number, part, split

    def _numbered(self, values: dict[str, Any]) -> dict[str, Any]:
        counted = {key: one.number(values) for key, one in self.numbering.items()}
        return {**values, **{key: number for key, number in counted.items() if number is not None}}

    def _unnumbered(self, values: dict[str, Any]) -> dict[str, Any] | None:
        for key, one in self.numbering.items():
            if key in values:
                split = one.split(values[key])
                if split is None:
                    return None
                values = {**{name: value for name, value in values.items() if name != key}, **split}
        return values

    def _number(self, value: int | str, key: str, config: Any) -> int:
        number = value if isinstance(value, int) else getattr(config, value, None)
        if not isinstance(number, int):
            raise PretrainedError(f"The mapping {self.name!r} needs `{key}`: {_lacks(value, config)}")
        return number

    def _counts(self, one: NumberingConfig, key: str, config: Any) -> tuple[int, ...]:
        counts = getattr(config, one.counts, None) if isinstance(one.counts, str) else one.counts
        if counts is None:
            text = _lacks(str(one.counts), config)
            raise PretrainedError(f"The mapping {self.name!r} needs `numbering.{key}.counts`: {text}")
        return tuple(counts)

    def _describe(self, found: Match, tensors: Specs, arrays: Specs) -> None:
        """Adds a line for each tensor without a place, and for each array without a tensor."""
        for name in found.unused:
            near = nearest(name, (other for other in tensors if other != name and other not in found.unused))
            expected = next(iter(self._rows_of_tensor(name)), "")
            hint = f": the model has no {expected}" if expected else f". Close: {near}" if near else ""
            found.problems.setdefault("In the files, without a place in the model", []).append(
                f"{label(name)} {tensors[name]}{hint}"
            )
        for name in found.missing:
            wanted = next((Pattern.of(self.mapping.tensors[number].tensors[0]).fill(values)
                           for number, _, values in self._rows_of_array(name)), "")  # fmt: skip
            near = nearest(wanted, found.unused) if wanted else nearest(name, (n for n in arrays if n != name))
            hint = f": the files have no {wanted}" if wanted else ": the mapping has no row for it"
            hint += f". Close: {near}" if near else ""
            found.problems.setdefault("In the model, without a tensor", []).append(f"{name} {arrays[name]}{hint}")

    def _rows_of_tensor(self, name: str) -> Iterator[str]:
        for row in self.mapping.tensors:
            for text in row.tensors:
                values = Pattern.of(text).match(name)
                if values is not None and row.arrays:
                    yield Pattern.of(row.arrays[0]).fill(self._numbered(values))


class _Numbering:
    """A number that counts through two others."""

    def __init__(self, config: NumberingConfig, counts: tuple[int, ...]) -> None:
        self._of, self._starts = config.of, [0, *accumulate(counts)]

    def number(self, values: Values) -> int | None:
        """The number of these values; None if they are not both there, or out of range."""
        first, second = (values.get(name) for name in self._of)
        if first is None or second is None or not 0 <= int(first) < len(self._starts) - 1:
            return None
        return self._starts[int(first)] + int(second)

    def split(self, number: int) -> dict[str, int] | None:
        """The two numbers; None if out of range."""
        for stage, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            if start <= number < end:
                return {self._of[0]: stage, self._of[1]: number - start}
        return None


def check(found: Match, path: Any, mapping: str, *, partial: bool) -> None:
    """Raises a `PretrainedError` with all problems; with `partial`, only for other shapes, and logs the rest."""
    for name, why in list(found.ignored.items())[:_MOST_NAMED]:
        LOG.info("%s: %s is not loaded: %s.", path, label(name), why)
    left = {kind: lines for kind, lines in found.problems.items() if not partial or kind == "Other shapes"}
    if left:
        cure = "" if partial else (
            "Use the model and the mapping of these files; `partial=True` loads what both have, and keeps the model's "
            "own values of the rest."
        )  # fmt: skip
        raise _error(
            f"The tensors of {path} and the arrays of the model do not match, by the mapping {mapping!r}", left, cure
        )
    if partial and not found.transfers:
        raise PretrainedError(f"No tensor of {path} has a place in the model, by the mapping {mapping!r}.")
    if found.problems:
        LOG.warning(
            "Partial load of %s: %d arrays keep their values%s, %d tensors are unused%s.",
            *(path, len(found.missing), _some(found.missing), len(found.unused), _some(found.unused)),
        )


def _some(names: list[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMED else ""
    return f" ({', '.join(map(label, names[:_MOST_NAMED]))}{more})" if names else ""


def _error(what: str, kinds: Mapping[str, list[str]], cure: str = "") -> PretrainedError:
    lines = [f"{what}:"]
    for kind, of_kind in kinds.items():
        lines.append(f"{kind} ({len(of_kind)}):")
        lines += [f"  {line}" for line in of_kind[:_MOST_LINES]]
        lines += [f"  … and {len(of_kind) - _MOST_LINES} more"] if len(of_kind) > _MOST_LINES else []
    return PretrainedError("\n".join([*lines, *([cure] if cure else [])]))


def _lacks(key: int | str, config: Any) -> str:
    if config is None:
        return f"it is `{key}` of the model's configuration, and the model has none. Write a number into the mapping."
    return f"{type(config).__name__} has no number `{key}`."
