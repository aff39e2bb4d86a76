"""Rows of a table in one test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def row(*values: Any) -> Iterator[None]:
    """Names the row of a table in an error of its `with` block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the row {values!r:.1000}")
        raise
