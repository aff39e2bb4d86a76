from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jax_trainer.diagnostics.leaves import leaf_path


class Moments(NamedTuple):
    mu: dict[str, jax.Array]


class Holder(flax.struct.PyTreeNode):
    inner: list[Moments]


def paths(tree: object) -> list[str]:
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_dicts_lists_tuples_and_dataclasses_are_written_with_dots():
    tree = {"state": Holder([Moments({"kernel": jnp.zeros(1)})]), "batch": (1, {0: 2})}
    assert paths(tree) == ["batch.0", "batch.1.0", "state.inner.0.mu.kernel"]


def test_the_path_of_a_bare_leaf_is_empty():
    assert paths(jnp.zeros(1)) == [""]


def test_an_entry_of_an_unknown_kind_is_written_as_it_prints():
    assert leaf_path(("plain", jax.tree_util.FlattenedIndexKey(3))) == "plain.3"
