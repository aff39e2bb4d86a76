"""Keeps secrets out of everything that is written: files, tables, errors."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
SECRET_KEY = re.compile(
    r"(^|[_.\-])(password|passwd|passphrase|secret|secrets|token|auth|credentials?|bearer|api[_\-]?key|access[_\-]?key|"
    r"secret[_\-]?key|private[_\-]?key)$",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"(?P<key>[\w.\-]*?[\w\-]+)(?P<sign>\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;}\]]+)")
_USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^\s/@]+@", re.IGNORECASE)
_LONG_ENOUGH = 8  # a shorter value of an environment variable would hide ordinary words


def is_secret(key: str) -> bool:
    """Whether the name of a key says that its value is a secret.

    >>> is_secret("api_key"), is_secret("wandb.token"), is_secret("tokens"), is_secret("author")
    (True, True, False, False)
    """
    return SECRET_KEY.search(key) is not None


def redact_text(text: str) -> str:
    """`text` without what looks like a secret, or is one by the name of its environment variable.

    >>> redact_text("https://me:hunter2@host/x, password=hunter2")
    'https://<hidden>@host/x, password=<hidden>'
    """
    for value in _environment_secrets():
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _ASSIGNED.sub(_hide_assigned, text)


def _hide_assigned(match: re.Match[str]) -> str:
    return f"{match['key']}{match['sign']}{HIDDEN}" if is_secret(match["key"]) else match[0]


def _environment_secrets() -> list[str]:
    found = {value for name, value in os.environ.items() if is_secret(name) and len(value) >= _LONG_ENOUGH}
    return sorted(found, key=len, reverse=True)


def redact(data: Any, key: str = "") -> Any:
    """Nested data with secrets hidden: by the name of their key, or by what they look like."""
    if isinstance(data, Mapping):
        return {redact_text(str(name)): redact(value, str(name)) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [redact(value, key) for value in data]
    if isinstance(data, str):
        return HIDDEN if data and is_secret(key) else redact_text(data)
    return data
