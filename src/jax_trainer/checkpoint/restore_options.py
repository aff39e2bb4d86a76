"""Which array of a checkpoint goes where in a state: strictly by name, dtype and shape, unless more is asked for."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp

from jax_trainer.checkpoint.leaves import Spec, check_fits, field_of
from jax_trainer.checkpoint.names import label
from jax_trainer.checkpoint.record import CheckpointError

_MOST_NAMED = 5
_log = logging.getLogger("jax_trainer")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How far a checkpoint may differ from the state that it is restored into.

    Args:
        cast: floating-point numbers of another precision are converted.
        partial: what the checkpoint lacks stays as the state has it, and what the state lacks is not restored.
        rename: patterns of names in the checkpoint, with `*`, and what becomes of them.
    """

    cast: bool = False
    partial: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for old, new in self.rename.items():
            if old.count("*") != new.count("*"):
                raise ValueError(f"`rename` must have as many `*` on both sides, got {old!r} and {new!r}.")

    def sources(
        self, held: Mapping[str, Spec], wanted: Mapping[str, Spec], only: Collection[str], path: Path
    ) -> dict[str, str]:
        """The name in the checkpoint for each name in the state that is restored; an error where they do not fit.

        Args:
            held: what the checkpoint in `path` holds, by its names.
            wanted: what the state holds, of which the fields in `only` are to be restored.
            only: names of fields.
            path: the checkpoint.
        """
        named = {new: old for new, old in self._renamed(held, path).items() if field_of(new) in only}
        found = {new: held[old] for new, old in named.items()}
        asked = {name: spec for name, spec in wanted.items() if field_of(name) in only}
        if self.partial:
            found, asked = _in_common(found, asked, path)
        check_fits({name: self._seen(spec, asked.get(name)) for name, spec in found.items()}, asked, path)
        return {name: named[name] for name in asked}

    def _seen(self, found: Spec, wanted: Spec | None) -> Spec:
        """`found` as it is once it is restored."""
        if not self.cast or wanted is None or not (_is_float(found) and _is_float(wanted)):
            return found
        return Spec(wanted.dtype, found.shape)

    def _renamed(self, held: Mapping[str, Spec], path: Path) -> dict[str, str]:
        unused, named = set(self.rename), dict[str, str]()
        for name in held:
            target = name
            for old, new in self.rename.items():
                if match := _pattern(old).fullmatch(name):
                    target = _filled(new, match)
                    unused.discard(old)
                    break
            if target in named:
                raise CheckpointError(f"Of {path}, both {named[target]} and {name} would be restored as {target}.")
            named[target] = name
        if unused:
            raise CheckpointError(
                f"`rename`: nothing in {path} is called {sorted(unused)[0]!r}. There are, for example: "
                f"{', '.join(map(label, sorted(held)[:_MOST_NAMED]))}."
            )
        return named


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
        check_fits(found, wanted, path)  # nothing at all is restored: that cannot be meant
    if missing or extra:
        _log.warning(
            "Of %s, %d arrays are restored. %d stay as they are%s; %d of the checkpoint are not used%s.",
            *(path, len(wanted) - len(missing), len(missing), _listed(missing), len(extra), _listed(extra)),
        )
    return {name: found[name] for name in found if name in wanted}, {n: wanted[n] for n in wanted if n in found}


def _listed(names: list[str]) -> str:
    more = ", …" if len(names) > _MOST_NAMED else ""
    return f" ({', '.join(map(label, names[:_MOST_NAMED]))}{more})" if names else ""
