"""The arrays of a checkpoint, put where a state has them."""

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


def read_into(like: TrainState, path: Path, record: Record, only: Sequence[str], fitting: RestoreOptions) -> TrainState:
    """`like` with the arrays of the checkpoint in `path`, as far as it is asked for them."""
    leaves = named_leaves(like)
    stored = stored_in(path, record)
    held, wanted = with_keys(stored, record), {name: Spec.of(leaf) for name, leaf in leaves.items()}
    sources = fitting.sources(held, wanted, only, path)
    converted = {name: held[source] for name, source in sources.items() if held[source] != wanted[name]}
    read = read_named(path, {source: converted.get(name, leaves[name]) for name, source in sources.items()})
    restored = {name: _converted(read[source], leaves[name], name in converted) for name, source in sources.items()}
    return jax.tree.unflatten(jax.tree.structure(like), {**leaves, **restored}.values())


def _converted(value: Any, leaf: Any, is_to_be: bool) -> Any:
    return placed(value.astype(leaf.dtype), leaf) if is_to_be else value
