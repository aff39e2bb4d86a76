"""`MappingConfig`: which tensor of the files is which array of a model, and the same of keys of `config.json`.

A mapping is data, read in both directions: to load weights, and to write them. The files in `mappings/` are those of
known models; a user's file has the same form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from jax_trainer.config import config_from, load_config
from jax_trainer.config.settings import AtLeast, Problem, Settings
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.models.pretrained.files import PretrainedError
from jax_trainer.models.pretrained.patterns import Pattern, Rearrange

Names = str | tuple[str, ...]
MappingLike = Any  # a name, a path, a dict or a `MappingConfig`
REQUIRED = "required"  # as the default of a key


@dataclass
class TensorRowConfig(Settings):
    """Tensors of the files, and the arrays of a model that have their values.

    Names are patterns: `{i}` is a number, `{i+1}` one that is larger by one, `*` any text, `[model.]` text that may be
    absent, `(weight|gamma)` one of several texts. `[…]` is written, and of several texts the first.

    Args:
        tensor: name of the tensor in the files; a list: several tensors are joined.
        array: dotted path of the array, such as `params.blocks.{i}.norm.scale` or `model_state.norm.mean`; a list: the
            tensor is split.
        rearrange: axes before and after loading, such as `out in -> in out`; `(a b)` is a product of two.
        axis: axis of the listed tensors or arrays along which they are joined.
        parts: relative sizes of listed tensors along `axis`, to write them; null: equal.
        tie: name of another tensor with the same values; this one is read if the model has its `array`, must be equal
            if it has not, and is not written.
        ignore: why tensors with this name are not loaded.
        optional: why a model may lack the array.
        beside: name of a counter in the files that belongs to the tensor: ignored, and written as 0.
    """

    tensor: Names
    array: Names | None = None
    rearrange: str | None = None
    axis: Annotated[int, AtLeast(0)] | None = None
    parts: tuple[Annotated[int, AtLeast(1)] | str, ...] | None = None
    tie: str | None = None
    ignore: str | None = None
    optional: str | None = None
    beside: str | None = None

    def problems(self) -> Iterator[Problem]:
        """Reports patterns that cannot be read, and sides that do not fit each other."""
        if not self.tensors:
            yield "tensor", "`tensor` is empty. Name at least one tensor."
            return
        texts = {"tensor": self.tensors, "array": self.arrays, "tie": _some(self.tie), "beside": _some(self.beside)}
        readers = [(key, Pattern.of, text) for key, of_key in texts.items() for text in of_key]
        readers += [("rearrange", Rearrange.of, text) for text in _some(self.rearrange)]
        for key, read, text in readers:
            try:
                read(text)
            except PretrainedError as error:
                yield key, str(error)
                return
        if self.ignore is None and self.tie is None and not self.arrays:
            text = f"`array` is missing for {self.tensors[0]!r}. Name an array, or give a reason to `ignore` it."
            yield "array", text
        if self.ignore is not None and self.arrays:
            yield "ignore", f"{self.tensors[0]!r} has an `array` and a reason to `ignore` it. Leave out one of them."
        if (len(self.tensors) > 1 or len(self.arrays) > 1) and self.axis is None:
            yield "axis", "Several tensors or arrays need the `axis` along which they are joined or split."
        if len(self.tensors) > 1 and len(self.arrays) > 1:
            yield "array", "Either `tensor` or `array` may be a list, not both."

    @property
    def tensors(self) -> tuple[str, ...]:
        """The patterns of the tensors."""
        return _some(self.tensor)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The patterns of the arrays; none for a row that is ignored."""
        return _some(self.array)


@dataclass
class ConfigRowConfig(Settings):
    """A key of `config.json`, and the key of our configuration with its value.

    Args:
        file: dotted key in `config.json`; a list: several keys, whose list of values is looked up in `values`.
        aliases: other names of the key, in files of other versions; they are read, but not written.
        key: dotted key of our configuration; null: the value is only checked, or written.
        default: the value where the file has no such key; "required": it must be there.
        values: pairs of the value in the file and ours; other values are refused. Several of the former may mean the
            same, and the first is written.
        must: the values that our model supports, if `key` is null.
        write: the value to write, if `key` is null.
        when: the key of our configuration that must be set for `write`.
        count: the value in the file may be a list or a section, whose entries are counted.
        shape: path of an array and number of one of its axes, whose size is written.
        property: property of our configuration, which is written.
    """

    file: Names
    aliases: tuple[str, ...] = ()
    key: str | None = None
    default: Any = REQUIRED
    values: tuple[tuple[Any, Any], ...] | None = None
    must: tuple[Any, ...] | None = None
    write: Any = None
    when: str | None = None
    count: bool = False
    shape: tuple[str, int] | None = None
    property: str | None = None


@dataclass
class NumberingConfig(Settings):
    """A number that counts through several numbers: block 5 of all is block 2 of stage 1, say.

    Args:
        of: the variables of the two numbers, such as `[stage, i]`.
        counts: how many of the second there are for each of the first: numbers, or a key of our configuration.
    """

    of: tuple[str, str]
    counts: str | tuple[int, ...]


@dataclass
class InputConfig(Settings):
    """An example input, from which a model is built.

    Args:
        shape: its shape: numbers, or dotted keys of `config.json`.
        dtype: its dtype.
    """

    shape: tuple[Annotated[int, AtLeast(1)] | str, ...]
    dtype: str = "float32"


@dataclass
class MappingConfig(Settings):
    """How the files of a pretrained model, and a model of ours, have each other's weights.

    Args:
        tensors: tensors and arrays; the first row that matches a name applies.
        sizes: sizes of the factors in `rearrange` and `parts`: numbers, or keys of our configuration.
        numbering: variables that count through two others.
        model_types: the `model_type` of `config.json` for which this mapping is used; the first is written.
        architecture: name of the class of transformers, for `config.json`.
        model: class name of our model.
        config: keys of `config.json` and of our configuration.
        more_config: further keys, if `config` is that of an included file.
        constants: keys of our configuration that all such models have, with their values.
        input: an example input of the model.
        trainer: class name of the trainer of an imported model.
    """

    tensors: tuple[TensorRowConfig, ...]
    sizes: dict[str, int | str] = field(default_factory=dict)
    numbering: dict[str, NumberingConfig] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    architecture: str | None = None
    model: str | None = None
    config: tuple[ConfigRowConfig, ...] = ()
    more_config: tuple[ConfigRowConfig, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    input: InputConfig | None = None
    trainer: str = "TrainerModule"

    def problems(self) -> Iterator[Problem]:
        """Reports rows whose two sides do not have the same variables."""
        for number, row in enumerate(self.tensors):
            for unknown in (part for part in row.parts or () if isinstance(part, str) and part not in self.sizes):
                yield f"tensors.{number}.parts", f"`parts` has {unknown!r}, which is not in `sizes`. Add it there."
            if not row.arrays:
                continue
            tensors, arrays = ([self._variables(text) for text in texts] for texts in (row.tensors, row.arrays))
            if any(one != tensors[0] for one in (*tensors, *arrays)):
                text = f"{row.tensors[0]!r} and {row.arrays[0]!r} must have the same variables."
                yield f"tensors.{number}.array", text

    @property
    def rows(self) -> tuple[ConfigRowConfig, ...]:
        """All rows of the configuration."""
        return (*self.config, *self.more_config)

    def _variables(self, text: str) -> set[str]:
        found = {name for name, _ in Pattern.of(text).variables}
        counted = [name for name in found if name in self.numbering]
        return (found - set(counted)) | {one for name in counted for one in self.numbering[name].of}


def read_mapping(mapping: MappingLike) -> tuple[str, MappingConfig]:
    """A mapping and its name in messages.

    Args:
        mapping: the name of a mapping of known models, such as "gpt2"; the path of a YAML file; a dict; or a
            `MappingConfig`.
    """
    if isinstance(mapping, MappingConfig):
        return "mapping", mapping
    if isinstance(mapping, Mapping):
        return "mapping", config_from(mapping, MappingConfig)
    if isinstance(mapping, str) and mapping in known_mappings():
        return mapping, known_mappings()[mapping]
    file = Path(mapping)
    if not file.is_file():
        near = suggestion(str(mapping), known_mappings())
        names = ", ".join(sorted(known_mappings()))
        raise FileNotFoundError(
            f"`mapping`: {str(mapping)!r} is neither a file nor a known mapping.{near} Known: {names}."
        )
    return file.name, load_config(file, MappingConfig, may_include=False).value


@cache
def known_mappings() -> dict[str, MappingConfig]:
    """The mappings of known models, by name."""
    files = sorted((Path(__file__).parent / "mappings").glob("*.yaml"))
    return {file.stem: load_config(file, MappingConfig).value for file in files}


def _some(names: Names | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
