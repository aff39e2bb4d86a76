"""`Matcher`: every tensor of the files and every array of a model has its place, or an error lists what has none.

A `Transfer` converts tensors to the arrays with the same values, and back.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

import numpy as np

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.diagnostics.files import label
from jax_trainer.diagnostics.suggestions import nearest
from jax_trainer.models.pretrained.files import PretrainedError
from jax_trainer.models.pretrained.mapping import MappingConfig, TensorRowConfig
from jax_trainer.models.pretrained.patterns import Pattern, Rearrange, Values

Specs = Mapping[str, Spec]
LOG = logging.getLogger("jax_trainer")
_MOST_LINES = 20  # of each kind
_MOST_NAMED = 5
UNUSED, MISSING = "In the files, without a place in the model", "In the model, without a tensor"
SHAPES, TWICE, INCOMPLETE = "Other shapes", "Several tensors for one array", "Incomplete"
_CURE = (
    "Use the model and the mapping of these files; `partial=True` loads what both have, and keeps the model's own "
    "values of the rest."
)


@dataclass(frozen=True)
class Transfer:
    """Tensors of the files and arrays of a model with the same values.

    Args:
        row: the row of the mapping.
        tensors: names of the tensors.
        arrays: names of the arrays.
        sizes: sizes of the factors in `rearrange` and `parts`.
    """

    row: TensorRowConfig
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: Mapping[str, int]

    def shape(self, tensors: Specs) -> tuple[int, ...]:
        """The shape of the arrays, joined."""
        joined = joined_shape([tensors[name].shape for name in self.tensors], self.row.axis)
        return joined if self.row.rearrange is None else Rearrange.of(self.row.rearrange).shape(joined, self.sizes)

    def to_arrays(self, read: Callable[[str], np.ndarray], arrays: Specs) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays by name, from the tensors that `read` returns; `arrays` has the shapes of all arrays."""
        axis = self.row.axis or 0
        value = _joined([read(name) for name in self.tensors], axis)
        if self.row.rearrange is not None:
            value = Rearrange.of(self.row.rearrange)(value, self.sizes)
        yield from _split(value, self.arrays, [(*arrays[name].shape, 1)[axis] for name in self.arrays], axis)

    def to_tensors(self, read: Callable[[str], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, from the arrays that `read` returns."""
        axis = self.row.axis or 0
        value = _joined([read(name) for name in self.arrays], axis)
        if self.row.rearrange is not None:
            value = Rearrange.of(self.row.rearrange).inverse(value, self.sizes)
        named = self.row.parts or [1] * len(self.tensors)
        yield from _split(
            value, self.tensors, [self.sizes[one] if isinstance(one, str) else one for one in named], axis
        )


def joined_shape(shapes: list[tuple[int, ...]], axis: int | None) -> tuple[int, ...]:
    """The shape of arrays of these shapes, joined along `axis`."""
    first, axis = shapes[0], axis or 0
    if len(shapes) == 1:
        return tuple(first)
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes if len(shape) > axis}
    if len(others) != 1 or any(len(shape) <= axis for shape in shapes):
        raise PretrainedError(
            f"shapes {' and '.join(str(list(shape)) for shape in shapes)} cannot be joined along {axis}."
        )
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _joined(parts: list[np.ndarray], axis: int) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def _split(value: np.ndarray, names: Sequence[str], parts: list[int], axis: int) -> Iterator[tuple[str, np.ndarray]]:
    """The parts of an array along `axis`, of these relative sizes, by name."""
    if len(names) == 1:
        return iter([(names[0], value)])
    unit, rest = divmod(value.shape[axis], sum(parts))
    if rest:
        raise PretrainedError(f"an axis of size {value.shape[axis]} cannot be split into {parts}.")
    return zip(names, np.split(value, [unit * end for end in accumulate(parts)][:-1], axis=axis), strict=True)


@dataclass
class Match:
    """What a mapping finds.

    Attributes:
        tensors: the specs of all tensors of the files.
        arrays: the specs of all arrays of the model that have a value in the files.
        transfers: tensors and arrays with the same values.
        sources: the same, by array.
        tied: tensors that must equal another one, which is loaded.
        ignored: tensors that are not loaded, and why.
        unused: tensors without a place.
        missing: arrays without a tensor.
        problems: by kind, a line for each that has no place, or another shape.
    """

    tensors: Specs
    arrays: Specs
    transfers: list[Transfer] = field(default_factory=list)
    sources: dict[str, Transfer] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)

    def report(self, kind: str, line: str) -> None:
        """Adds a problem."""
        self.problems.setdefault(kind, []).append(line)

    def transfer(self, transfer: Transfer) -> None:
        """Adds a transfer, if no other one has its arrays and the shapes agree."""
        if twice := [name for name in transfer.arrays if name in self.sources]:
            self.report(TWICE, f"{twice[0]}: {', '.join((*self.sources[twice[0]].tensors, *transfer.tensors))}")
            return
        self.transfers.append(transfer)
        self.sources.update(dict.fromkeys(transfer.arrays, transfer))
        wanted = joined_shape([self.arrays[name].shape for name in transfer.arrays], transfer.row.axis)
        sources = ", ".join(f"{name} {self.tensors[name]}" for name in transfer.tensors)
        try:
            found = transfer.shape(self.tensors)
        except PretrainedError as error:
            self.report(SHAPES, f"{transfer.arrays[0]} from {sources}: {error}")
            return
        if found != wanted:
            how = "" if transfer.row.rearrange is None else f" ({transfer.row.rearrange})"
            names = ", ".join(transfer.arrays)
            self.report(SHAPES, f"{names} is {list(wanted)} in the model, and {list(found)} from {sources}{how}")

    def check(self, path: Any, mapping: str, *, partial: bool) -> None:
        """Raises a `PretrainedError` with all problems; with `partial`, logs what has no counterpart instead."""
        for name, why in list(self.ignored.items())[:_MOST_NAMED]:
            LOG.info("%s: %s is not loaded: %s.", path, label(name), why)
        left = {kind: lines for kind, lines in self.problems.items() if not (partial and kind in (UNUSED, MISSING))}
        if left:
            what = f"The tensors of {path} and the arrays of the model do not match, by the mapping {mapping!r}"
            raise _error(what, left, "" if partial else _CURE)
        if partial and not self.transfers:
            raise PretrainedError(f"No tensor of {path} has a place in the model, by the mapping {mapping!r}.")
        if self.problems:
            LOG.warning(
                "Partial load of %s: %d arrays keep their values%s, %d tensors are unused%s.",
                *(path, len(self.missing), _some(self.missing), len(self.unused), _some(self.unused)),
            )


class Matcher:
    """Applies a mapping to names.

    Args:
        name: of the mapping, in messages.
        mapping: the rows.
        config: our configuration, whose keys the mapping may name as sizes; None without any.
    """

    def __init__(self, name: str, mapping: MappingConfig, config: Any = None) -> None:
        self.name, self.mapping = name, mapping

        def value_of(given: Any, key: str) -> Any:
            value = getattr(config, given, None) if isinstance(given, str) else given
            if value is None:
                lacks = f"it is `{given}` of the model's configuration, and the model has none. Write a number instead."
                lacks = lacks if config is None else f"{type(config).__name__} has no number `{given}`."
                raise PretrainedError(f"The mapping {name!r} needs `{key}`: {lacks}")
            return value

        self.sizes = {key: value_of(size, f"sizes.{key}") for key, size in mapping.sizes.items()}
        # of a number that counts through two others: their names, and their values in order
        self.numbering: dict[str, tuple[tuple[str, str], list[tuple[Any, ...]]]] = {}
        for key, one in mapping.numbering.items():
            counts = value_of(one.counts, f"numbering.{key}.counts")
            self.numbering[key] = one.of, [(first, at) for first, most in enumerate(counts) for at in range(most)]

    def match(self, tensors: Specs, arrays: Specs) -> Match:
        """The places of tensors in a model, of which `arrays` are all arrays that have a value in the files."""
        found, sources = Match(tensors, arrays), self._sources(tensors)
        for (number, key, _), names in sources.items():
            self._place(found, self.mapping.tensors[number], dict(key), names)
        self._add_tied_arrays(found)
        found.missing = [name for name in arrays if name not in found.sources]
        known = {name for names in sources.values() for name in names.values()}
        found.unused += [name for name in tensors if name not in known and name not in found.ignored]
        self._describe(found)
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

    def _sources(self, tensors: Iterable[str]) -> dict[tuple[int, Any, int], dict[int, str]]:
        """The tensors of each row and its variables, by their number in the row.

        Several tensors of `(weight|gamma)` are counted, so that none is lost.
        """
        groups: dict[tuple[int, Any, int], dict[int, str]] = {}
        for name in tensors:
            for number, row in enumerate(self.mapping.tensors):
                texts = (*row.tensors, *((row.beside,) if row.beside else ()))
                matches = ((part, Pattern.of(text).match(name)) for part, text in enumerate(texts))
                part, values = next(((part, found) for part, found in matches if found is not None), (0, None))
                if values is not None:
                    key = number, tuple(sorted(values.items()))
                    again = next(n for n in count() if part not in groups.get((*key, n), {}))
                    groups.setdefault((*key, again), {})[part] = name
                    break
        return groups

    def _place(self, found: Match, row: TensorRowConfig, values: dict[str, Any], names: dict[int, str]) -> None:
        """Adds what becomes of the tensors of one row with these values of its variables."""
        if row.beside is not None and (counter := names.pop(len(row.tensors), None)) is not None:
            found.ignored[counter] = "a counter of the training"
        own = tuple(names[part] for part in sorted(names))
        if row.ignore is not None:
            found.ignored.update(dict.fromkeys(own, row.ignore))
            return
        if len(own) < len(row.tensors):
            absent = [Pattern.of(text).fill(values) for part, text in enumerate(row.tensors) if part not in names]
            found.report(INCOMPLETE, f"{', '.join(own)}: joined with {', '.join(absent)}, which the files lack")
            return
        wanted = self._arrays(row, values)
        if wanted and all(name in found.arrays for name in wanted):
            found.transfer(Transfer(row, own, wanted, self.sizes))
        elif row.tie is not None and (other := self._tied_to(row, values, found.tensors)) is not None:
            found.tied.update(dict.fromkeys(own, other))
        elif row.optional is not None and not any(name in found.arrays for name in wanted):
            found.ignored.update(dict.fromkeys(own, row.optional))
        else:
            found.unused += own

    def _arrays(self, row: TensorRowConfig, values: dict[str, Any]) -> tuple[str, ...]:
        """The paths of the arrays of a row; none if its numbers are out of range."""
        for key, (of, pairs) in self.numbering.items():
            if set(of) <= values.keys():
                pair = tuple(values[name] for name in of)
                if pair not in pairs:
                    return ()
                values = {**values, key: pairs.index(pair)}
        return tuple(Pattern.of(text).fill(values) for text in row.arrays)

    def _tied_to(self, row: TensorRowConfig, values: Values, tensors: Specs) -> str | None:
        pattern = Pattern.of(row.tie or "")
        return next((name for name in tensors if (other := pattern.match(name)) is not None and other == values), None)

    def _add_tied_arrays(self, found: Match) -> None:
        """Arrays of the model whose tensor is not in the files, because it equals another one."""
        for name in [name for name in found.arrays if name not in found.sources]:
            for number, _, values in self._rows_of_array(name):
                row = self.mapping.tensors[number]
                if row.tie is not None and (other := self._tied_to(row, values, found.tensors)) is not None:
                    found.transfer(Transfer(row, (other,), (name,), self.sizes))
                    break

    def _rows_of_array(self, name: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """The rows that match the path of an array: number, part, and values of the variables of the tensors."""
        for number, row in enumerate(self.mapping.tensors):
            for part, text in enumerate(row.arrays):
                values = Pattern.of(text).match(name)
                split = None if values is None else self._unnumbered(values)
                if split is not None:
                    yield number, part, split

    def _unnumbered(self, values: dict[str, Any]) -> dict[str, Any] | None:
        for key, (of, pairs) in self.numbering.items():
            if key in values:
                number = values.pop(key)
                if number >= len(pairs):
                    return None
                values.update(zip(of, pairs[number], strict=True))
        return values

    def _describe(self, found: Match) -> None:
        """Adds a line for each tensor without a place, and for each array without a tensor."""
        for number, name in enumerate(found.unused):
            hint = self._hint_for_tensor(name, found) if number < _MOST_LINES else ""
            found.report(UNUSED, f"{label(name)} {found.tensors[name]}{hint}")
        for number, name in enumerate(found.missing):
            hint = self._hint_for_array(name, found) if number < _MOST_LINES else ""
            found.report(MISSING, f"{name} {found.arrays[name]}{hint}")

    def _hint_for_tensor(self, name: str, found: Match) -> str:
        patterns = ((row, Pattern.of(text)) for row in self.mapping.tensors if row.arrays for text in row.tensors)
        for row, pattern in patterns:
            if (values := pattern.match(name)) is not None:
                wanted = self._arrays(row, values)
                return f": the model has no {wanted[0]}" if wanted else ": the model has not so many"
        near = nearest(name, (other for other in found.tensors if other != name and other not in found.unused))
        return f". Close: {near}" if near else ""

    def _hint_for_array(self, name: str, found: Match) -> str:
        number, _, values = next(self._rows_of_array(name), (None, 0, {}))
        if number is None:
            hint, near = ": the mapping has no row for it", nearest(name, (n for n in found.arrays if n != name))
        else:
            wanted = Pattern.of(self.mapping.tensors[number].tensors[0]).fill(values)
            hint, near = f": the files have no {wanted}", nearest(wanted, found.unused)
        return hint + (f". Close: {near}" if near else "")


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
