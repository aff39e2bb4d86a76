"""The tables of `scaling.py`: measured next to needed communication."""

import itertools
from collections.abc import Iterable, Sequence

from hlo_collectives import Collective
from scaling_cases import Need

Row = tuple[str, ...]

SHOWN = 10_000  # bytes; smaller collectives that are not needed are omitted

SENT = "layout", "phase", "needed", "found", "ratio", "ratio, scattered"
BY_KIND = (
    "layout",
    "numbers",
    "needed",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "other",
    "all",
    "ratio",
    "temporary",
)
KEPT = "layout", "state on a device", "state / devices that share it", "temporary", "ratio"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)


def header(columns: Sequence[str]) -> str:
    """The header of a Markdown table."""
    return markdown([columns, ["---"] * len(columns)])


def compared(needs: Iterable[Need], found: Iterable[Collective]) -> list[Row]:
    """A row per phase and family: needed, found, and their ratio. The last row includes the omitted ones."""
    lines = []
    needs, found = list(needs), list(found)
    for phase, group in itertools.product(("forward", "backward", "update"), ("gather", "reduce", "exchange")):
        needed = [need for need in needs if (need.phase, family(need.kind)) == (phase, group)]
        there = [one for one in found if (one.phase, family(one.kind)) == (phase, group)]
        if needed or sum(one.sent for one in there) >= SHOWN:
            lines.append((phase, _needed(needed), _counted(there), *_ratios(needed, there)))
    return [*lines, ("**all**", _megabytes(needs), _megabytes(found), *_ratios(needs, found))]


def by_kind(needs: Sequence[Need], found: Sequence[Collective]) -> Row:
    """One row: needed bytes, and the number of collectives of each kind with their bytes."""
    listed = "all-gather", "reduce-scatter", "all-reduce"
    groups = [[one for one in found if one.kind == kind] for kind in listed]
    groups.append([one for one in found if one.kind not in listed])
    cells = [f"{sum(one.times for one in group)}: {_megabytes(group)}" if group else "" for group in groups]
    least = "" if all(one.is_certain for one in found) else "at least "  # in a loop of unknown length
    return _megabytes(needs), *cells, f"{least}{_megabytes(found)}", _ratios(needs, found)[0]


def family(kind: str) -> str:
    """The family of a collective: all kinds of reductions are compared with each other."""
    return {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}.get(kind, "exchange")


def _needed(needs: Sequence[Need]) -> str:
    kinds = [f"{need.number or ''} {need.kind}".strip() for need in needs]
    return f"{', '.join(kinds)}: {_megabytes(needs)}" if needs else "nothing"


def _counted(found: Sequence[Collective]) -> str:
    if not found:
        return "nothing"
    kinds = sorted({one.kind for one in found})
    counts = [f"{sum(one.times for one in found if one.kind == kind)} {kind}" for kind in kinds]
    unsure = "" if all(one.is_certain for one in found) else " (in a loop of unknown length: one iteration)"
    return f"{', '.join(counts)}: {_megabytes(found)}{unsure}"


def _megabytes(things: Iterable[Need | Collective]) -> str:
    return f"{sum(thing.sent for thing in things) / 1e6:.3f} MB"


def _ratios(needs: Sequence[Need], found: Sequence[Collective]) -> tuple[str, str]:
    needed = sum(need.sent for need in needs)
    if not needed:
        return "", ""
    written, scattered = sum(one.sent for one in found), sum(one.sent_if_scattered for one in found)
    return f"{written / needed:.2f}", f"{scattered / needed:.2f}"
