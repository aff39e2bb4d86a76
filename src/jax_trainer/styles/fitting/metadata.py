"""The arguments of `fit` as plain data: for `config.yaml`, for the logged hyperparameters, and to find a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jax_trainer.redaction import redact


def config_text(metadata: Mapping[str, Any]) -> str:
    """The text of `config.yaml`; equal metadata give equal text."""
    return yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)


def plain_hparams(hparams: Any) -> dict[str, Any]:
    """Returns `hparams` as numbers, strings, lists and dicts, without secrets; refuses other types.

    >>> plain_hparams({"lr": np.float32(0.5), "layers": (8, 8), "api_key": "hunter2"})
    {'lr': 0.5, 'layers': [8, 8], 'api_key': '<hidden>'}
    """
    if hparams is None:
        return {}
    if not isinstance(hparams, Mapping):
        raise TypeError(f"`hparams` must be a dict, got a {type(hparams).__name__}.")
    return redact(_plain(hparams, "hparams"))


def name_of(function: Any) -> str | None:
    """The qualified name of a function; None for None."""
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(name, path): _plain(item, f"{path}[{name!r}]") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "dtype") and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value).item()  # first: numpy's float64 is also a float
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return str(value)
    raise TypeError(
        f"`{path}` is a {type(value).__name__}, which cannot be saved. Pass numbers, strings, and lists and "
        "dicts of them."
    )


def _key(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`{path}` has the key {name!r}, a {type(name).__name__}. Use strings as keys.")
    return name
