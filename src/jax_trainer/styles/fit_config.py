"""What `fit` was told, as plain data: for `config.yaml`, for the page of hyperparameters, and to find a run again."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HIDDEN = "<hidden>"
_SECRET_NAME = re.compile(
    r"(?:^|[_.\-])(?:password|passwd|passphrase|secret|credential|auth|bearer|(?:api|access|private|secret)[_\-]?key)s?\Z"
    r"|(?:^|(?:api|access|auth|bearer|refresh|secret|hf|wandb|github)[_\-])token\Z",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]{0,30}://)[^\s/]+@", re.IGNORECASE)


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
    return _plain(hparams, "hparams")


def name_of(function: Any) -> str | None:
    """What a function that was given is called; None where none was given."""
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {_key(name, path): _entry(name, item, path) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", str(value))
    if hasattr(value, "dtype") and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value).item()
    raise TypeError(
        f"`{path}` is a {type(value).__name__}, which cannot be written down. Pass numbers, texts, and lists and dicts "
        "of them."
    )


def _entry(name: str, value: Any, path: str) -> Any:
    plain = _plain(value, f"{path}[{name!r}]")
    return HIDDEN if _SECRET_NAME.search(name) and plain not in (None, "") and not isinstance(plain, bool) else plain


def _key(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`{path}` has the key {name!r}, a {type(name).__name__}. Use texts as keys.")
    return name
