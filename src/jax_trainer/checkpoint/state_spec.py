"""What the arrays of a state are called, and how they are saved: found once, as all states of a run are alike."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jax_trainer.checkpoint.leaves import Spec, as_stored, impl_of, named_leaves
from jax_trainer.checkpoint.snapshot import SnapshotMethod, method_for
from jax_trainer.core import PyTree


@dataclass(frozen=True)
class StateSpec:
    """The arrays of a state, without their values."""

    specs: dict[str, Spec]  # by dotted name, in the order of the tree
    empty: dict[str, Spec]  # the empty ones, which orbax refuses
    keys: dict[str, str]  # the implementation of each typed key
    nbytes: int  # of all arrays, as they are stored
    method: SnapshotMethod

    def stored(self, leaves: list[Any]) -> dict[str, Any]:
        """The `leaves` of the state by name, as they are stored."""
        named = dict(zip(self.specs, leaves, strict=True))
        return named | {name: as_stored(named[name]) for name in self.keys}


class StateSpecs:
    """The spec of each state that is saved: of one like the last, the same again."""

    def __init__(self) -> None:
        self._last: tuple[Any, StateSpec] | None = None

    def of(self, state: PyTree) -> tuple[StateSpec, dict[str, Any]]:
        """The spec of `state`, and its arrays as they are stored; a `CheckpointError` for one that cannot be saved."""
        leaves, structure = jax.tree.flatten(state)
        kinds = [tuple(getattr(leaf, name, None) for name in ("shape", "dtype", "sharding")) for leaf in leaves]
        if self._last is None or self._last[0] != (structure, kinds):
            self._last = (structure, kinds), _spec_of(state)
        spec = self._last[1]
        return spec, spec.stored(leaves)


def _spec_of(state: PyTree) -> StateSpec:
    named = named_leaves(state)
    stored = {name: as_stored(leaf) for name, leaf in named.items()}
    stored_specs = {name: Spec.of(leaf) for name, leaf in stored.items()}
    return StateSpec(
        specs={name: Spec.of(leaf) for name, leaf in named.items()},
        empty={name: spec for name, spec in stored_specs.items() if not math.prod(spec.shape)},
        keys={name: impl for name, leaf in named.items() if (impl := impl_of(leaf))},
        nbytes=sum(spec.nbytes for spec in stored_specs.values()),
        method=method_for(stored),
    )
