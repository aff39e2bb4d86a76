"""Restoring: chooses an intact checkpoint, matches its arrays to a state, and reads them.

Arrays match strictly by name, dtype and shape, unless `RestoreOptions` relax it.
"""

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.checkpoint.arrays import (
    ARRAYS,
    Spec,
    as_stored,
    impl_of,
    named_leaves,
    placed,
    put,
    read_arrays,
    sharding_of,
    stored_specs,
)
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.record import Record, SavedCheckpoint, read_saved, verify_digests
from jax_trainer.core import TrainState, digest_of
from jax_trainer.core.extra_args import AROUND
from jax_trainer.diagnostics.files import label

Damaged = Callable[[SavedCheckpoint | None], Mapping[Path, str]]
Check = Callable[[SavedCheckpoint], object]
OPTIMIZER = "opt_state"  # the field that weights-only checkpoints lack
_MOST_LINES, _MOST_NAMED = 30, 5
_MOST_GUESSES = 20  # each compares one name with all unmatched ones
_log = logging.getLogger("jax_trainer")


# which checkpoint


def no_check(saved: SavedCheckpoint) -> None:
    """Accepts every record: only the arrays are used."""


def first_complete(
    candidates: Iterable[SavedCheckpoint], damaged: Damaged, nothing: str, check: Check = no_check
) -> SavedCheckpoint:
    """The first intact checkpoint of `candidates`; skipped ones are logged.

    Args:
        candidates: in order of preference.
        damaged: problems of other checkpoints that would precede the chosen one; for None, of all.
        nothing: the error message if there is no checkpoint at all, not even a damaged one.
        check: see `CheckpointStore.restore`.
    """
    problems: list[str] = []
    for saved in candidates:
        try:
            read_verified(saved.path, check)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if skipped := [*problems, *damaged(saved).values()]:
            _log.warning("Restoring %s. Skipped damaged checkpoints: %s", saved.path, " ".join(skipped))
        return saved
    problems += damaged(None).values()
    if not problems:
        raise CheckpointError(nothing)
    raise CheckpointError(
        f"All checkpoints are damaged: {' '.join(problems)} Training does not restart from step 0 in this folder. "
        "Bring back a copy of a checkpoint, or start a new run in another folder."
    )


def read_verified(path: Path, check: Check = no_check) -> SavedCheckpoint:
    """The checkpoint in `path`, of which all files are read; a `CheckpointError` if it is damaged."""
    saved, record = read_saved(path)
    verify_digests(path)
    stored_in(path, record)  # matching digests do not make a valid index of arrays
    check(saved)
    return saved


def not_resumable(saved: SavedCheckpoint, found: Collection[SavedCheckpoint]) -> CheckpointError:
    """Why `saved` cannot be resumed, and which of `found` can be."""
    steps = ", ".join(str(other.step) for other in found if not other.without)
    deleted = "" if any(other.step > saved.step for other in found) else " A later one was deleted."
    return CheckpointError(
        f"{saved.path} was stored without `{OPTIMIZER}`, as a best one with `save_optimizer_state: false`: it can be "
        f"loaded and tested, but not resumed. Resumable steps: {steps or 'none'}.{deleted}"
    )


# its arrays


def read_into(
    like: TrainState, path: Path, record: Record, only: Sequence[str], options: "RestoreOptions"
) -> TrainState:
    """`like` with the fields `only` restored from the checkpoint in `path`."""
    leaves = named_leaves(like)
    _check_frozen(like, path, record)
    stored = stored_in(path, record)
    found, wanted = with_keys(stored, record), {name: Spec.of(leaf) for name, leaf in leaves.items()}
    sources = options.sources(found, wanted, only, path, log=True)
    converted = {name: found[source] for name, source in sources.items() if found[source] != wanted[name]}
    read = read_named(path, record, {source: converted.get(name, leaves[name]) for name, source in sources.items()})
    restored = {name: read[source] for name, source in sources.items()}
    restored |= {name: placed(restored[name].astype(leaves[name].dtype), leaves[name]) for name in converted}
    return jax.tree.unflatten(jax.tree.structure(like), {**leaves, **restored}.values())


def _check_frozen(like: TrainState, path: Path, record: Record) -> None:
    """Refuses another base than the one that the weights were trained with."""
    arrays = jax.tree.leaves(like.frozen)
    if not arrays or isinstance(arrays[0], jax.ShapeDtypeStruct) or not record.frozen:
        return
    if (found := digest_of(like.frozen)) != record.frozen:
        raise CheckpointError(
            f"{path} has adapters of a base with the digest {record.frozen}, and the base here has {found}. Use that "
            "run's `trainer.init_from`, model, precision and `trainer.seed`."
        )


def stored_in(path: Path, record: Record) -> dict[str, Spec]:
    """The specs of the stored arrays of the checkpoint in `path`. Reads no array."""
    return stored_specs(path / ARRAYS, record.small)


def with_keys(stored: Mapping[str, Spec], record: Record) -> dict[str, Spec]:
    """The specs as in a state, where some of the stored arrays are typed keys."""
    keys = {name: Spec(f"key<{impl}>", stored[name].shape[:-1]) for name, impl in record.keys.items() if name in stored}
    return {**stored, **keys}


def read_named(path: Path, record: Record, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the checkpoint in `path` named in `like`, with its shardings; the specs must already agree."""
    keys = {name: leaf for name, leaf in like.items() if impl_of(leaf)}
    read = read_arrays(path / ARRAYS, {name: as_stored(leaf) for name, leaf in like.items()}, record.small)
    return read | {name: _as_key(read[name], leaf) for name, leaf in keys.items()}


def _as_key(key_data: Any, like: Any) -> Any:
    key = jax.random.wrap_key_data(key_data, impl=impl_of(like))  # the implementation of the program, not of the file
    sharding = sharding_of(like)
    return key if sharding is None else put(key, sharding)


# names, dtypes and shapes


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How much a checkpoint may differ from the state to restore.

    Args:
        cast: convert floating-point arrays of another precision.
        partial: keep the state's arrays that the checkpoint lacks, and ignore arrays that the state lacks; fields of
            the state: only for theirs.
        rename: patterns of names in the checkpoint, with `*`, and what becomes of them.
    """

    cast: bool = False
    partial: bool | Collection[str] = False
    rename: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for old, new in self.rename.items():
            if new is not None and old.count("*") != new.count("*"):
                raise ValueError(f"`rename` must have as many `*` on both sides, got {old!r} and {new!r}.")

    def sources(
        self,
        stored: Mapping[str, Spec],
        wanted: Mapping[str, Spec],
        only: Collection[str],
        path: Path,
        *,
        log: bool = False,
    ) -> dict[str, str]:
        """The name in the checkpoint for each restored name in the state; an error if they do not match.

        Args:
            stored: the specs in the checkpoint.
            wanted: the specs of the state.
            only: the fields of the state to restore.
            path: the checkpoint.
            log: log what a partial restore leaves out.
        """
        named = {new: old for new, old in self._renamed(stored, path).items() if _is_selected(new, only)}
        found = {new: stored[old] for new, old in named.items()}
        restored = {name: spec for name, spec in wanted.items() if _is_selected(name, only)}
        restored = {name: spec for name, spec in restored.items() if name in found or not self._leaves_out(name)}
        if self.partial:
            fields = only if self.partial is True else self.partial
            found, restored = _in_common(found, restored, fields, path, log=log)
        check_fits({name: self._after_cast(spec, restored.get(name)) for name, spec in found.items()}, restored, path)
        return {name: named[name] for name in restored}

    def _after_cast(self, found: Spec, wanted: Spec | None) -> Spec:
        """The spec after restoring."""
        if not self.cast or wanted is None or not (_is_float(found) and _is_float(wanted)):
            return found
        return Spec(wanted.dtype, found.shape)

    def _leaves_out(self, name: str) -> bool:
        return any(new is None and _pattern(old).fullmatch(name) for old, new in self.rename.items())

    def _renamed(self, stored: Mapping[str, Spec], path: Path) -> dict[str, str]:
        unused, named = set(self.rename), dict[str, str]()
        for name in stored:
            target: str | None = name
            for old, new in self.rename.items():
                if match := _pattern(old).fullmatch(name):
                    target = None if new is None else _filled(new, match)
                    unused.discard(old)
                    break
            if target is None:
                continue
            if target in named:
                raise CheckpointError(f"`rename` maps both {named[target]} and {name} of {path} to {target}.")
            named[target] = name
        if unused:
            raise CheckpointError(
                f"`rename`: no array in {path} matches {sorted(unused)[0]!r}. It has, for example: "
                f"{', '.join(map(label, sorted(stored)[:_MOST_NAMED]))}."
            )
        return named


def _is_selected(name: str, only: Collection[str]) -> bool:
    # a learning rate scale belongs to the optimizer: weights are loaded without it
    return field_of(name) in only and ("opt_state" in only or not name.startswith(f"extra.{AROUND}."))


def _is_float(spec: Spec) -> bool:
    return not spec.dtype.startswith("key<") and bool(jnp.issubdtype(spec.dtype, jnp.floating))


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, text.split("*"))))


def _filled(text: str, match: re.Match[str]) -> str:
    groups = iter(match.groups())
    return re.sub(r"\*", lambda _: next(groups), text)


def _in_common(
    found: Mapping[str, Spec], wanted: Mapping[str, Spec], fields: Collection[str], path: Path, *, log: bool
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    missing = [name for name in wanted if name not in found and field_of(name) in fields]
    extra = [name for name in found if name not in wanted and field_of(name) in fields]
    if len(missing) == len(wanted):
        check_fits(found, wanted, path)  # nothing would be restored: always an error
    if log and (missing or extra):
        _log.warning(
            "Partial restore of %s: %d arrays restored, %d keep their values%s, %d of the checkpoint are unused%s.",
            *(path, len(wanted) - len(missing), len(missing), _listed(missing), len(extra), _listed(extra)),
        )
    without = {*missing, *extra}
    return {n: found[n] for n in found if n not in without}, {n: wanted[n] for n in wanted if n not in without}


def _listed(names: list[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMED else ""
    return f" ({', '.join(map(label, names[:_MOST_NAMED]))}{more})" if names else ""


def field_of(name: str) -> str:
    """The field of the state that contains the array with this dotted name.

    >>> field_of("opt_state.0.mu.out.bias")
    'opt_state'
    """
    return name.partition(".")[0]


def check_fits(found: Mapping[str, Spec], wanted: Mapping[str, Spec], checkpoint: Path) -> None:
    """Fails unless a checkpoint has exactly the wanted arrays; lists all differences."""
    lines = list(_differences(found, wanted))
    if not lines:
        return
    listed = "\n".join(f"  {line}" for line in lines[:_MOST_LINES])
    more = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    raise CheckpointError(
        f"The checkpoint {checkpoint} does not match the state to restore:\n{listed}{more}\n"
        "Use the model, the optimizer and the precision that it was saved with."
    )


def _differences(found: Mapping[str, Spec], wanted: Mapping[str, Spec]) -> Iterator[str]:
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            yield f"{name}: expected {wanted[name]}, found {found[name]}"
    extra = [name for name in found if name not in wanted]
    for number, name in enumerate(name for name in wanted if name not in found):
        guess = _guess(name, wanted[name], found, extra) if number < _MOST_GUESSES else ""
        yield f"{name}: expected {wanted[name]}, missing in the checkpoint{guess}"
    for name in extra:
        yield f"{label(name)}: not expected, found {found[name]}"


def _guess(name: str, spec: Spec, found: Mapping[str, Spec], extra: list[str]) -> str:
    alike = [other for other in extra if found[other] == spec and other.isprintable()]
    close = difflib.get_close_matches(name, alike[:500], n=1)
    return f" (it has {close[0]}: renamed?)" if close else ""
