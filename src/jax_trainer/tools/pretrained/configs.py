"""`config.json` ⇄ our configuration of a model, by the rows of a mapping."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.config import as_data, config_from
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.models.pretrained.files import PretrainedError, read_config
from jax_trainer.models.pretrained.mapping import (
    REQUIRED,
    ConfigRowConfig,
    MappingConfig,
    MappingLike,
    known_mappings,
    read_mapping,
)
from jax_trainer.models.pretrained.matching import Specs
from jax_trainer.trainer import StoredRun

_ABSENT = object()


def from_pretrained_config(path: str | Path, mapping: MappingLike | None = None, overrides: Sequence[str] = ()) -> Any:
    """The configuration of our model for the `config.json` of a pretrained one.

    Args:
        path: the folder of the pretrained model, or its `config.json`.
        mapping: see `load_pretrained`; None: by the `model_type` of the file.
        overrides: keys to change, such as `model.context=512`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Pass a folder with a `config.json`, or that file.")
    content = read_config(path)
    return model_config(content, *select_mapping(mapping, content, path), overrides)


def select_mapping(
    mapping: MappingLike | None, content: Mapping[str, Any] | None, path: Path
) -> tuple[str, MappingConfig]:
    """The mapping that was passed, or the one for the `model_type` of `config.json`."""
    if mapping is not None:
        return read_mapping(mapping)
    kind, known = (content or {}).get("model_type"), known_mappings()
    for name, one in known.items():
        if kind in one.model_types:
            return name, one
    types = sorted(kind for one in known.values() for kind in one.model_types)
    if kind is None:
        text = f"{path} has no `config.json` with a `model_type`. Pass `mapping`: one of {', '.join(known)}, or a file."
        raise PretrainedError(text)
    raise PretrainedError(
        f"{path}: no mapping is known for `model_type` {kind!r}.{suggestion(str(kind), types)} Known: "
        f"{', '.join(types)}. Pass `mapping`, a YAML file for this model."
    )


def model_config(content: Mapping[str, Any], name: str, mapping: MappingConfig, overrides: Sequence[str] = ()) -> Any:
    """Our configuration for the content of a `config.json`; an error lists everything that is not supported."""
    if mapping.model is None:
        raise PretrainedError(
            f"The mapping {name!r} names no `model` to configure. Build the model yourself, and load it."
        )
    section: dict[str, Any] = {"class_name": mapping.model, **mapping.constants}
    problems = []
    for row in mapping.rows:
        value = _value_in(content, row)
        if value is _ABSENT:
            problems.append(f"`{_names(row)[0]}` is missing")
        elif row.values is not None and not any(_same(value, theirs) for theirs, _ in row.values):
            known = ", ".join(f"{theirs!r}" for theirs, _ in row.values)
            problems.append(f"`{', '.join(_names(row))}` is {value!r}; supported: {known}")
        elif row.must is not None and not any(_same(value, one) for one in row.must):
            problems.append(f"`{_names(row)[0]}` is {value!r}; supported: {', '.join(map(repr, row.must))}")
        elif row.key is not None and value is not None:  # null: our default
            ours = value if row.values is None else next(own for theirs, own in row.values if _same(value, theirs))
            _put(section, row.key, len(ours) if row.count and isinstance(ours, list | dict) else ours)
    if problems:
        raise PretrainedError(f"`config.json` is not supported by {mapping.model} ({name}): {'; '.join(problems)}.")
    return config_from({"trainer": {"class_name": mapping.trainer}, "model": section}, StoredRun, overrides).model


def hf_config(config: Any, mapping: MappingConfig, arrays: Specs) -> dict[str, Any]:
    """The content of the `config.json` of a model with this configuration and these arrays."""
    data, content = as_data(config), dict[str, Any]()
    value: Any
    if mapping.model_types:
        content["model_type"] = mapping.model_types[0]
    if mapping.architecture is not None:
        content["architectures"] = [mapping.architecture]
    for row in mapping.rows:
        if row.shape is not None:
            value = arrays[row.shape[0]].shape[row.shape[1]]
        elif row.property is not None:
            value = as_data(getattr(config, row.property))
        elif row.key is None:
            value = row.write if row.when is None or _get(data, row.when) is not None else None
        else:
            value = _get(data, row.key)
        if row.key is not None and row.values is not None:
            value = next((theirs for theirs, own in row.values if _same(value, own)), None)
        if value is None and row.default == REQUIRED and (row.key is not None or row.shape is not None):
            raise PretrainedError(f"`{row.key}` of {type(config).__name__} has no value for `config.json`. Set it.")
        names = _names(row)
        if value is not None:
            for one, part in zip(names, [value] if len(names) == 1 else value, strict=True):
                _put(content, one, part)
    return content


def example_of(mapping: MappingConfig, content: Mapping[str, Any] | None) -> Any:
    """The example input of a mapping, as a shape; None without any."""
    if mapping.input is None:
        return None
    sizes = [size if isinstance(size, int) else _get(content or {}, size) for size in mapping.input.shape]
    if unknown := [one for one, size in zip(mapping.input.shape, sizes, strict=True) if not isinstance(size, int)]:
        raise PretrainedError(
            f"`input` of the mapping needs `{unknown[0]}` of `config.json`. Pass `example`, an input."
        )
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), jnp.dtype(mapping.input.dtype))


def _value_in(content: Mapping[str, Any], row: ConfigRowConfig) -> Any:
    names = _names(row)
    if len(names) > 1:
        found = [_get(content, name, _ABSENT) for name in names]
        return _ABSENT if any(value is _ABSENT for value in found) else found
    for name in (*names, *row.aliases):
        if (value := _get(content, name, _ABSENT)) is not _ABSENT:
            return value
    if row.default != REQUIRED:
        return row.default
    return _ABSENT if row.write is None else row.write


def _names(row: ConfigRowConfig) -> tuple[str, ...]:
    return (row.file,) if isinstance(row.file, str) else tuple(row.file)


def _get(data: Any, key: str, default: Any = None) -> Any:
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return default
        data = data[name]
    return data


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        data = data.setdefault(name, {})
    data[last] = value


def _same(one: Any, other: Any) -> bool:
    as_list = lambda value: [as_list(item) for item in value] if isinstance(value, list | tuple) else value
    one, other = as_list(one), as_list(other)
    return one == other and isinstance(one, bool) == isinstance(other, bool)
