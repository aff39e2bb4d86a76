"""Which run a training continues: the earlier one with the same fingerprint, or a new one.

| `resume` | the same | only longer or shorter | anything else differs |
|---|---|---|---|
| "auto" | continues it; a completed one is returned | continues it to the new length | starts a new run |
| True, or a path | continues it | continues it to the new length | an error, unless `allow_changes` names it |

What was decided is said in one line, unless there is no earlier run.
"""

import json
import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_trainer.checkpoint.errors import CheckpointError, writing_to
from jax_trainer.checkpoint.folder import RECORD, RunFolder
from jax_trainer.checkpoint.mirror import address_of
from jax_trainer.checkpoint.record import name_of, read_saved
from jax_trainer.checkpoint.remote import pull, remote_records
from jax_trainer.datasets.storage import StoreError
from jax_trainer.diagnostics.files import read_json, safe_join, write_atomically
from jax_trainer.diagnostics.output import short_path
from jax_trainer.runs.fingerprint import PARTS, Comparison, Difference, Facts, Fingerprint, facts_in, merged
from jax_trainer.runs.target import RunTarget, broadcast_from_primary, resumable_step, run_and_step
from jax_trainer.sharding.placement import is_primary

LOG = logging.getLogger("jax_trainer")
MAX_RECORD = 1 << 24  # bytes of `run.json`
Resume = bool | Literal["auto"] | str | Path
Where = tuple[Path, str, str | None]  # the folder of all runs, the name of this one, its version or None


class OtherRunError(ValueError):
    """The run to resume computes something else than this one. The message names what differs, and what to do."""


class _Earlier(NamedTuple):
    """An earlier run, and how it compares; None: its fingerprint is unknown."""

    folder: RunFolder
    comparison: Comparison | None
    facts: Facts | None = None


def find_target(
    resume: Resume,
    where: Where,
    fingerprint: Fingerprint | None,
    *,
    own: RunFolder | None = None,
    fork: bool = False,
    mirror: str = "",
    allow_changes: Collection[str] = (),
) -> RunTarget:
    """The folder to write to and the run to resume, the same in all processes; creates the folder of a new run.

    Args:
        resume, fork, allow_changes: arguments of the style.
        where: where the run is.
        fingerprint: what it computes; None if it resumes nothing.
        own: the folder that `resume=True` means; None: the run with this fingerprint.
        mirror: URL of the folder with copies of all runs, where runs are also found; "": none.
    """
    allowed = checked_parts(allow_changes)

    def find() -> RunTarget:
        if fork and not resume:
            raise ValueError("`fork` resumes into a new folder: pass `resume`, the run to resume from.")
        if not resume:
            return RunTarget(RunFolder.create(*where))
        assert fingerprint is not None
        named, step = own if resume is True else None, None
        if not isinstance(resume, bool) and resume != "auto":
            named, step = run_and_step(Path(resume))
        if named is not None:
            found = _compared(named, recorded_facts(named.path), fingerprint)
        else:
            found = _found(where, mirror, fingerprint, allowed, may_start=resume == "auto")
        if found is None:
            return RunTarget(RunFolder.create(*where))
        at = resumable_step(found.folder) if step is None else step
        changes = _checked(found, fingerprint, allowed, at, is_named=named is not None)
        return RunTarget(RunFolder.create(*where) if fork else found.folder, found.folder, step, tuple(changes))

    return broadcast_from_primary(find)


class Recorded(NamedTuple):
    """What has saved checkpoints: its facts, and how it differs from what it has resumed."""

    facts: Facts
    changes: tuple[Difference, ...] = ()

    def write(self, folder: Path) -> None:
        """Writes it to `run.json` in a folder of checkpoints."""
        before = _record_in(folder)
        allowed = [(part, text) for part, text in before.get("allowed", [])]
        record = {
            "fingerprint": self.facts,
            "allowed": [*allowed, *(one for one in self.changes if one not in allowed)],
        }
        record = json.loads(json.dumps(record))
        if is_primary() and record != before:
            with writing_to(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def resuming(
    name: Path | str,
    facts: Facts | None,
    fingerprint: Fingerprint,
    allow_changes: Collection[str],
    step: int,
    edits: Collection[Mapping[str, Any]] = (),
) -> Recorded:
    """Compares a training that resumes at `step` without a run folder; an `OtherRunError` for what may not differ.

    Args:
        name: what it resumes: the folder of its checkpoints, or text.
        facts: of what has saved it; None: unknown.
        edits: the edits of callbacks so far.
    """
    compared = None if facts is None else fingerprint.compared(facts, lambda: {str(one.get("by")) for one in edits})
    earlier = _Earlier(RunFolder(Path(name)), compared, facts)
    changes = _checked(earlier, fingerprint, checked_parts(allow_changes), step, is_named=True)
    return Recorded(fingerprint.resuming(facts), tuple(changes))


def recorded_facts(folder: Path) -> Facts | None:
    """The facts in `run.json` of a folder; None if there are none, or they are damaged."""
    return facts_in(_record_in(folder))


def _record_in(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / RECORD, MAX_RECORD)
    except (OSError, ValueError):
        return {}


def checked_parts(names: Collection[str]) -> tuple[str, ...]:
    """The parts that `allow_changes` names; a `ValueError` for others."""
    found = tuple(names.split(",")) if isinstance(names, str) else tuple(names)
    if wrong := [name for name in found if name not in PARTS]:
        raise ValueError(f"`allow_changes` has {wrong[0]!r}. Parts of a run that may differ: {', '.join(PARTS)}.")
    return found


def _found(
    where: Where, mirror: str, fingerprint: Fingerprint, allowed: Collection[str], *, may_start: bool
) -> _Earlier | None:
    """The run that computes the same, here or in the mirror; None: a new one starts."""
    parent, name, version = where
    runs = [_compared(one, recorded_facts(one.path), fingerprint) for one in RunFolder.earlier(*where)]
    chosen = _chosen(runs, allowed)
    try:
        if mirror and chosen is None:
            records = remote_records(address_of(mirror, name), version)
            for folder, record in records.items():
                local = RunFolder(safe_join(Path(parent).absolute() / name, folder))
                if not local.config_file.is_file():
                    runs.append(_compared(local, facts_in(record), fingerprint))
            chosen = _chosen(runs, allowed)
        if mirror and chosen is not None:
            pull(address_of(mirror, name, chosen.folder.path.name), chosen.folder)
    except StoreError as error:
        if chosen is None or not chosen.folder.config_file.is_file():
            raise CheckpointError(
                "`resume`: the mirror cannot be read, so it is unknown whether it has this run, or how far it is. "
                f"{error}. Try again, or train without `resume` to start a new run."
            ) from None
        LOG.warning("The mirror cannot be read, so the run resumes from %s: %s", chosen.folder.path, error)
    if chosen is not None:
        return chosen
    nearest = min(runs, key=lambda one: (len(_differences(one)) or len(PARTS) + 1, len(_text(one))), default=None)
    problem = f"No run in {short_path(parent / name)} computes the same: "
    if nearest is not None:
        path = short_path(nearest.folder.path)
        text = f"the nearest earlier one, {path}, differs in {_text(nearest)}. To continue that one, use "
        text += f"{_allowing([one.part for one in _differences(nearest)], path)}."
        if not may_start or version is not None:
            raise OtherRunError(problem + text)
        LOG.warning("A new run starts: %s", text)
    elif not may_start:
        raise OtherRunError(f"{problem}it has none. Pass `resume='auto'` to start one, or the folder of a run.")
    return None


def _compared(folder: RunFolder, facts: Facts | None, fingerprint: Fingerprint) -> _Earlier:
    if facts is None:
        return _Earlier(folder, None)
    return _Earlier(folder, fingerprint.compared(facts, partial(_edited_by, folder)), facts)


def _edited_by(folder: RunFolder) -> set[str]:
    """The classes of the callbacks that have changed the state of a run so far."""
    step = resumable_step(folder)
    try:
        run = {} if step is None else read_saved(folder.checkpoints / name_of(step))[0].run
    except CheckpointError:  # which the restore reports
        return set()
    return {str(one.get("by")) for one in run.get("loop", {}).get("edits", ())}


def _chosen(runs: list[_Earlier], allowed: Collection[str]) -> _Earlier | None:
    """The newest run that computes the same; without any, the newest that differs only in what is allowed."""
    known = [one for one in runs if one.comparison is not None]
    return next((one for allow in ((), allowed) for one in known if not _differences(one, allow)), None)


def _differences(run: _Earlier, allowed: Collection[str] = ()) -> list[Any]:
    return [] if run.comparison is None else run.comparison.without(allowed)


def _checked(
    run: _Earlier, fingerprint: Fingerprint, allowed: Collection[str], step: int | None, *, is_named: bool
) -> list[Difference]:
    """The allowed differences from the run to resume; raises an `OtherRunError` for others.

    `is_named`: the user has named the run, and so knows that it continues.
    """
    folder, comparison = short_path(run.folder.path), run.comparison
    if comparison is None or run.facts is None:
        LOG.warning("%s has no fingerprint: whether it computes the same cannot be compared.", folder)
        return []
    if differences := _differences(run, allowed):
        raise OtherRunError(
            f"The run in {folder} computes something else: {_text(run)}. To continue it all the same, pass "
            f"{_allowing([*allowed, *(one.part for one in differences)])}."
        )
    changes = [*comparison.differences]
    past, coming = fingerprint.rate_changes(run.facts, step or 0) if comparison.is_rescheduled else ("", "")
    if past and "optimizer" not in allowed:
        raise OtherRunError(
            f"The run in {folder} cannot become longer or shorter: {comparison.schedule}, and {past}. Keep its length, "
            f"start a new run (without `resume`), or continue with another schedule from here on: "
            f"{_allowing([*allowed, 'optimizer'])}."
        )
    changes = merged([*changes, *([Difference("optimizer", past)] if past else [])])
    if comparison.note:
        LOG.warning("%s: %s", folder, comparison.note)
    if comparison.schedule or coming:
        level = logging.INFO if is_named and not coming else logging.WARNING
        LOG.log(level, "%s continues with %s.", folder, ", ".join(filter(None, (comparison.schedule, coming))))
    if changes:
        LOG.warning("%s continues with changes: %s.", folder, "; ".join(map(str, changes)))
    return changes


def _text(run: _Earlier) -> str:
    return "; ".join(map(str, _differences(run))) or "its fingerprint, which is unknown"


def _allowing(parts: Collection[str], folder: str = "") -> str:
    """The words that continue a run although these parts differ, on the command line and in Python."""
    shell, python = ([f"resume={folder}"], [f"resume={folder!r}"]) if folder else ([], [])
    if parts:
        shell, python = [*shell, f"allow_changes={','.join(parts)}"], [*python, f"allow_changes={(*parts,)}"]
    return f"`{' '.join(shell)}`, in Python `{', '.join(python)}`"
