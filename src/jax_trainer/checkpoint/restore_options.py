"""Matches arrays of a checkpoint to a state: strictly by name, dtype and shape, unless options relax it."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp

from jax_trainer.checkpoint.leaves import Spec, check_fits, field_of
from jax_trainer.checkpoint.names import label
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core.extra_args import HYPERPARAMS

_MOST_NAMED = 5
_log = logging.getLogger("jax_trainer")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How much a checkpoint may differ from the state to restore.

    Args:
        cast: convert floating-point arrays of another precision.
        partial: keep the state's arrays that the checkpoint lacks, and ignore arrays that the state lacks.
        rename: patterns of names in the checkpoint, with `*`, and what becomes of them.
    """

    cast: bool = False
    partial: bool = False
    rename: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for old, new in self.rename.items():
            if new is not None and old.count("*") != new.count("*"):
                raise ValueError(f"`rename` must have as many `*` on both sides, got {old!r} and {new!r}.")

    def sources(
        self, stored: Mapping[str, Spec], wanted: Mapping[str, Spec], only: Collection[str], path: Path
    ) -> dict[str, str]:
        """The name in the checkpoint for each restored name in the state; an error if they do not match.

        Args:
            stored: the specs in the checkpoint.
            wanted: the specs of the state.
            only: the fields of the state to restore.
            path: the checkpoint.
        """
        named = {new: old for new, old in self._renamed(stored, path).items() if _is_selected(new, only)}
        found = {new: stored[old] for new, old in named.items()}
        restored = {name: spec for name, spec in wanted.items() if _is_selected(name, only)}
        restored = {name: spec for name, spec in restored.items() if name in found or not self._leaves_out(name)}
        if self.partial:
            found, restored = _in_common(found, restored, path)
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
    return field_of(name) in only and ("opt_state" in only or not name.startswith(f"extra.{HYPERPARAMS}."))


def _is_float(spec: Spec) -> bool:
    return not spec.dtype.startswith("key<") and bool(jnp.issubdtype(spec.dtype, jnp.floating))


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, text.split("*"))))


def _filled(text: str, match: re.Match[str]) -> str:
    first, *others = text.split("*")
    return first + "".join(group + part for group, part in zip(match.groups(), others, strict=True))


def _in_common(
    found: Mapping[str, Spec], wanted: Mapping[str, Spec], path: Path
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    missing, extra = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    if len(missing) == len(wanted):
        check_fits(found, wanted, path)  # nothing would be restored: always an error
    if missing or extra:
        _log.warning(
            "Partial restore of %s: %d arrays restored, %d keep their values%s, %d of the checkpoint are unused%s.",
            *(path, len(wanted) - len(missing), len(missing), _listed(missing), len(extra), _listed(extra)),
        )
    return {name: found[name] for name in found if name in wanted}, {n: wanted[n] for n in wanted if n in found}


def _listed(names: list[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMED else ""
    return f" ({', '.join(map(label, names[:_MOST_NAMED]))}{more})" if names else ""
