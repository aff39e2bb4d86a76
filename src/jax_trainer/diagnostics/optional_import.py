"""Optional packages, which come with an extra of this library."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtraError(ModuleNotFoundError):
    """An optional package is not installed; the message names the extra of this library that installs it."""


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around the import of an optional package: if it is missing, the error names the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        hint = f"{missing.name} is not installed; run `pip install 'jax-trainer[{extra}]'`."
        raise MissingExtraError(hint, name=missing.name) from None


def require_extra(package: str, extra: str) -> None:
    """Raises `ModuleNotFoundError` if an optional package is missing, without importing it."""
    with from_extra(extra):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
