"""Imports of optional packages, in the functions that need them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around the import of an optional package: if it is missing, the error names the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        hint = f"{missing.name} is not installed; run `pip install 'jax-trainer[{extra}]'`."
        raise ModuleNotFoundError(hint, name=missing.name) from None
