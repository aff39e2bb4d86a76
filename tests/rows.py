"""One test for a table of rows about one promise."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted_row(*values: object) -> Iterator[None]:
    """Adds the row of a table to an error inside the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the row {', '.join(f'{one!r:.200}' for one in values)}.")
        raise
