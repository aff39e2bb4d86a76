"""One test for a table of rows about one promise."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


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
                try:
                    test(**own, **dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)))
                except BaseException as error:
                    error.add_note(f"In the row {row!r:.500}")
                    raise

        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in keys]
        run.__dict__["__signature__"] = signature.replace(parameters=fixtures)
        return run

    return decorate
