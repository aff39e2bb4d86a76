"""Text and tables as HTML. Whatever comes from a run folder passes `text_of`."""

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import pairwise

from jax_trainer.diagnostics.output import tame

_MAX_VALUE = 300  # characters
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells, without columns that have no content; "" without rows."""
    if not rows:
        return ""
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    head = "".join(f"<th>{heads[column]}</th>" for column in kept)
    body = "".join(f"<tr>{''.join(f'<td>{row[column]}</td>' for column in kept)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


@cache
def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("jax_trainer.tools.reports").joinpath(name).read_text(encoding="utf-8")


def text_of(value: object) -> str:
    """A value as HTML text: escaped, with control characters spelled out."""
    return escape(tame(str(value)))


def value_of(value: object) -> str:
    """A value of a configuration, as YAML writes it."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"<code>{text_of(text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + '…')}</code>"


def duration(seconds: float | None) -> str:
    """A time for a person.

    >>> duration(7.25), duration(3700), duration(None)
    ('7.2 s', '1 h 1 min', '')
    """
    if seconds is None:
        return ""
    for (size, unit), (smaller, its_unit) in pairwise(_UNITS):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {its_unit}"
    return f"{seconds:.1f} s"


def bytes_of(count: float) -> str:
    """A size for a person.

    >>> bytes_of(433_960), bytes_of(80e9)
    ('434 kB', '80 GB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def figure(content: str, caption: str) -> str:
    """A drawing, an image or a text with a caption, as HTML."""
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"


def grid_of(figures: Sequence[str], kind: str = "samples") -> str:
    """Figures side by side; "" without any."""
    return f'<div class="{kind}">{"".join(figures)}</div>' if figures else ""
