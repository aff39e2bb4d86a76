"""One test for a table of rows about one promise."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_row(*values: object) -> Iterator[None]:
    """Adds the row of a table to an error inside the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"In the row {', '.join(f'{one!r:.200}' for one in values)}.")
        raise


def each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`pytest.mark.parametrize` as one test: an error names its row, and every row has an empty `tmp_path`."""
    keys, table = [name.strip() for name in names.split(",")], list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, row in enumerate(table):
                own = dict(fixtures)
                if "tmp_path" in fixtures:
                    own["tmp_path"] = fixtures["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                with noted_row(row):
                    test(**own, **dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)))

        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in keys]
        run.__dict__["__signature__"] = signature.replace(parameters=fixtures)
        return run

    return decorate
