"""Configured secrets never reach a file or a log: values of secret keys and variables, and credentials in URLs.

A secret is recognized by the name of its key or environment variable. Its value is hidden wherever it occurs; text that
only looks like a secret is not searched for.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

HIDDEN = "<hidden>"
_LONG_ENOUGH = 6  # shorter secrets are hidden under their key, but not in other text

_SECRET_NAME = re.compile(
    r"(?:password|passwd|passphrase|secret)s?\Z|(?:^|_)(?:pwd|o?auth|authorization|bearer|jwt|credentials?|token|"
    r"(?:api|access|private|signing|encryption|ssh)_?keys?)\Z"
)
# `pad_token` and `loss_per_token` are ordinary names in language models
_ORDINARY_NAME = re.compile(
    r"(?:^|_)(?:pad|padding|eos|bos|unk|unknown|mask|sep|cls|class|start|begin|end|stop|special|extra|register|blank|"
    r"newline|space|image|audio|video|prefix|suffix|first|last|next|new|per|by)_token\Z"
)
_FOLDERS = ("PWD", "OLDPWD")  # variables of a shell; any other name with `pwd` is a password
_CAMEL_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]{0,30}://)[^\s/]+@", re.IGNORECASE)
_IN_QUERY = re.compile(r"(?P<before>[?&](?P<key>[\w.\-]{1,60})=)[^&#\s]+")


def is_secret(key: str) -> bool:
    """Whether the name of a key, or of a section above it, is that of a secret.

    >>> is_secret("api_key"), is_secret("wandb.token"), is_secret("max_tokens"), is_secret("author")
    (True, True, False, False)
    """
    return any(_is_secret_name(_CAMEL_HUMP.sub("_", name).lower().replace("-", "_")) for name in key.split("."))


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _ORDINARY_NAME.search(name) is None


def redact(data: Any, key: str = "", secrets: Collection[str] = ()) -> Any:
    """Nested data with secrets hidden: under secret keys, in URLs, and wherever the same text occurs.

    `secrets` are additional secret texts, besides those in the data and in the environment.

    >>> redact({"token": "hunter2", "url": "https://me:hunter2@host", "note": "token: see above"})
    {'token': '<hidden>', 'url': 'https://<hidden>@host', 'note': 'token: see above'}
    """
    return _redacted(data, is_secret(key), environment_secrets() | secret_values(data, key) | frozenset(secrets))


def _redacted(data: Any, is_hidden: bool, known: Collection[str]) -> Any:
    if isinstance(data, Mapping):
        return {
            redact_text(str(name), known): _redacted(value, is_hidden or is_secret(str(name)), known)
            for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [_redacted(value, is_hidden, known) for value in data]
    if is_hidden and _can_be_secret(data):
        return HIDDEN
    return redact_text(data, known) if isinstance(data, str) else data


def redact_text(text: str, known: Collection[str]) -> str:
    """A text without `known` secrets, and without credentials in URLs.

    >>> redact_text("hunter2 is no password of https://me:swordfish@host/x?token=abc", ["hunter2"])
    '<hidden> is no password of https://<hidden>@host/x?token=<hidden>'
    """
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_QUERY.sub(_hide_if_secret, _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text))


def _hide_if_secret(match: re.Match[str]) -> str:
    return f"{match['before']}{HIDDEN}" if is_secret(match["key"]) else match[0]


def environment_secrets() -> frozenset[str]:
    """The values of environment variables with secret names."""
    named = {name: value for name, value in os.environ.items() if is_secret(name) and name not in _FOLDERS}
    return frozenset(form for value in named.values() for form in _forms(value))


def secret_values(data: Any, key: str = "") -> frozenset[str]:
    """The values in nested data under secret keys."""
    return frozenset(form for value in _under_secret_names(data, is_secret(key)) for form in _forms(value))


def _under_secret_names(data: Any, is_hidden: bool) -> Iterator[str]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _under_secret_names(value, is_hidden or is_secret(str(name)))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _under_secret_names(value, is_hidden)
    elif is_hidden and _can_be_secret(data):
        yield str(data)


def _can_be_secret(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def _forms(value: str) -> Iterator[str]:
    """A secret as it occurs in data and in messages, where quotes and backslashes are escaped."""
    if len(value) >= _LONG_ENOUGH and value != HIDDEN:
        yield from (value, repr(value)[1:-1])
