"""What `fit` was told, as plain data: for `config.yaml`, for the page of hyperparameters, and to find a run again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jax_trainer.redaction import redact


def config_text(told: Mapping[str, Any]) -> str:
    """`told` as the text of `config.yaml`; two runs that were told the same have the same text."""
    return yaml.safe_dump(dict(told), sort_keys=False, allow_unicode=True)


def plain_hparams(hparams: Any) -> dict[str, Any]:
    """`hparams` as numbers, texts, lists and dicts of them, without secrets; an error names what is something else.

    >>> plain_hparams({"lr": np.float32(0.5), "layers": (8, 8), "api_key": "hunter2"})
    {'lr': 0.5, 'layers': [8, 8], 'api_key': '<hidden>'}
    """
    if hparams is None:
        return {}
    if not isinstance(hparams, Mapping):
        raise TypeError(f"`hparams` must be a dict, got a {type(hparams).__name__}.")
    return redact(_plain(hparams, "hparams"))


def name_of(function: Any) -> str | None:
    """What a function that was given is called; None where none was given."""
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(name, path): _plain(item, f"{path}[{name!r}]") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "dtype") and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value).item()  # first, for numpy's float64 is a float
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return str(value)
    raise TypeError(
        f"`{path}` is a {type(value).__name__}, which cannot be written down. Pass numbers, texts, and lists and dicts "
        "of them."
    )


def _key(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`{path}` has the key {name!r}, a {type(name).__name__}. Use texts as keys.")
    return name
