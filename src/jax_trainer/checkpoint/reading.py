"""Restores the arrays of a checkpoint into a state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_trainer.checkpoint.arrays import placed
from jax_trainer.checkpoint.content import read_named, stored_in, with_keys
from jax_trainer.checkpoint.leaves import Spec, named_leaves
from jax_trainer.checkpoint.record import Record
from jax_trainer.checkpoint.restore_options import RestoreOptions
from jax_trainer.core import TrainState


def read_into(like: TrainState, path: Path, record: Record, only: Sequence[str], options: RestoreOptions) -> TrainState:
    """`like` with the fields `only` restored from the checkpoint in `path`."""
    leaves = named_leaves(like)
    stored = stored_in(path, record)
    found, wanted = with_keys(stored, record), {name: Spec.of(leaf) for name, leaf in leaves.items()}
    sources = options.sources(found, wanted, only, path)
    converted = {name: found[source] for name, source in sources.items() if found[source] != wanted[name]}
    read = read_named(path, {source: converted.get(name, leaves[name]) for name, source in sources.items()})
    restored = {name: _converted(read[source], leaves[name], name in converted) for name, source in sources.items()}
    return jax.tree.unflatten(jax.tree.structure(like), {**leaves, **restored}.values())


def _converted(value: Any, leaf: Any, needs_cast: bool) -> Any:
    return placed(value.astype(leaf.dtype), leaf) if needs_cast else value
